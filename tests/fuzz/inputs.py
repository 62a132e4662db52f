"""The inputs that are kept for each fuzz target: a corpus, in one zip a target, and each input that once found a fault.

`tests/fuzz/corpus/TARGET.zip` is made by `scripts/fuzz --keep`: honest seeds and what the fuzzer made of them,
minimised.
`tests/fuzz/findings/TARGET/WORDS` is a file a fault, and WORDS say what it was.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
MAX_SECONDS = 5.0  # of the processor, for one input
MAX_MEMORY = 512 * 2**20  # bytes, beside what the process has when it begins
MAX_CORPUS = 64 * 2**10  # bytes of a target's zip
MAX_INPUTS = 250  # of a target's zip
NAMES = sorted(file.stem for file in (HERE / "targets").glob("*.py"))
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Target:
    """A parser, as a function of bytes that raises `errors` for what it refuses, and nothing else."""

    name: str
    module: ModuleType

    def __call__(self, data: bytes) -> bool:
        """False if the input was refused. Raises whatever must not be."""
        try:
            self.module.fuzz(data)
        except self.module.ERRORS:
            return False
        return True

    @property
    def mutate(self) -> Callable[[bytes, int, int, Callable[[bytes, int], bytes]], bytes] | None:
        """Makes another input of one, within the form: (input, most bytes, seed, a mutation of bytes)."""
        return getattr(self.module, "mutate", None)

    def seeds(self) -> Iterable[bytes]:
        """Honest inputs, and some that are not."""
        return self.module.seeds()

    @property
    def corpus(self) -> Path:
        return HERE / "corpus" / f"{self.name}.zip"

    @property
    def findings(self) -> Path:
        return HERE / "findings" / self.name


def target(name: str) -> Target:
    return Target(name, importlib.import_module(f"tests.fuzz.targets.{name}"))


def kept(of: Target) -> Iterator[tuple[str, bytes]]:
    """The inputs by name: the corpus, and the findings."""
    if of.corpus.exists():
        with zipfile.ZipFile(of.corpus) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
    if of.findings.exists():
        yield from ((file.name, file.read_bytes()) for file in sorted(of.findings.iterdir()))


def keep(of: Target, inputs: Iterable[bytes]) -> int:
    """Makes the corpus anew, of the shortest inputs that find room. Returns their number."""
    by_name = {hashlib.sha256(data).hexdigest()[:12]: data for data in inputs}
    chosen = sorted(by_name, key=lambda name: (len(by_name[name]), name))[:MAX_INPUTS]
    of.corpus.parent.mkdir(exist_ok=True)
    while True:
        with zipfile.ZipFile(of.corpus, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in sorted(chosen):
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), by_name[name], zipfile.ZIP_DEFLATED)
        if of.corpus.stat().st_size <= MAX_CORPUS:
            return len(chosen)
        chosen = chosen[: len(chosen) * 9 // 10]


@contextmanager
def bounded_memory(num_bytes: int = MAX_MEMORY) -> Iterator[None]:
    """No more than so much beside what there is already: a MemoryError is raised beyond."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
