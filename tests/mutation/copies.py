"""Copies of the repository in which a file may be broken while tests run there."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.mutation.places import ROOT, WORK

ONE_TEST = 30  # seconds after which a test hangs; the slowest of those that are asked takes less than a third
# `x is 3` is a mutant that must be seen by what it does, not by the compiler's warning. Plugins that no test needs here
# take seconds to import.
OPTIONS = (
    *("-q", "-p", "tests.mutation.recorder", "-p", "no:cacheprovider"),
    *("-p", "no:cloudcoil", "-p", "no:schemathesis", "-p", "no:xdist"),
    *("-W", "ignore::SyntaxWarning", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


@dataclass(frozen=True)
class Run:
    """What came of a run of tests: pytest's exit code, or None after its time; what was noted, what was printed."""

    code: int | None
    record: tuple[dict[str, Any], ...]
    output: str


class Copy:
    """A copy of the repository. `before` are words that go before whatever loads the machine, such as `nice`."""

    def __init__(self, folder: Path, before: tuple[str, ...]) -> None:
        self.folder = folder
        self._before = before
        self._record = folder / ".record"

    @contextmanager
    def broken(self, file: str, source: str) -> Iterator[None]:
        """The copy with another text of a file; then the file is as it was, and so is its time, for compiled files."""
        try:
            (self.folder / file).write_text(source)
            yield
        finally:
            shutil.copy2(ROOT / file, self.folder / file)

    def first_failure(self, tests: Sequence[str], seconds: float) -> Run:
        """Runs tests until one fails, for at most so many seconds."""
        self._record.unlink(missing_ok=True)
        output = self.folder / ".output"
        arguments = [*OPTIONS, "-x", f"--timeout={ONE_TEST}", *tests]
        order = {"pytest": arguments, "seconds": seconds, "output": str(output)}
        with self._permitted():
            assert self._forking.stdin is not None
            assert self._forking.stdout is not None
            self._forking.stdin.write(json.dumps(order) + "\n")
            self._forking.stdin.flush()
            code = json.loads(self._forking.stdout.readline())
        return Run(code, self._recorded(), output.read_text(errors="replace"))

    def under_coverage(self, tests: str, data: Path, packages: Sequence[str]) -> Run:
        """Runs tests; coverage's data say which test ran which lines."""
        self._record.unlink(missing_ok=True)
        tool = [sys.executable, "-m", "coverage", "run", f"--data-file={data}", f"--source={','.join(packages)}"]
        with self._permitted():
            done = subprocess.run(
                [*tool, "-m", "pytest", *OPTIONS, tests],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        return Run(done.returncode, self._recorded(), done.stdout)

    @property
    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "MUTATION_RECORD": str(self._record)}
        return os.environ | own

    @cached_property
    def _forking(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.mutation.forking"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self._environment, stdin=pipe, stdout=pipe, text=True)

    @contextmanager
    def _permitted(self) -> Iterator[None]:
        """While a program runs that `before` lets run."""
        with subprocess.Popen([*self._before, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
            assert held.stdin is not None
            assert held.stdout is not None
            held.stdin.write(b"\n")
            held.stdin.flush()
            held.stdout.readline()
            yield
            held.stdin.close()

    def _recorded(self) -> tuple[dict[str, Any], ...]:
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return tuple(json.loads(line) for line in lines)


class Copies:
    """As many copies as may be used at once, made anew; what was compiled in them before is kept."""

    def __init__(self, number: int, before: tuple[str, ...] = ()) -> None:
        self.number = number
        self._free = queue.SimpleQueue[Copy]()
        for index in range(number):
            self._free.put(Copy(_made(WORK / "copies" / str(index)), before))

    @contextmanager
    def borrowed(self) -> Iterator[Copy]:
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def _made(folder: Path) -> Path:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    for file in [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"]:
        if str(file.relative_to(folder)) not in wanted:
            file.unlink()
    for name in sorted(wanted):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder
