"""Compiles `kernels.c` for a level of processor and a type of numbers; without torch, as wheels are built with it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lora_serve.model.native.levels import GENERIC, X86_LEVELS, Level, serving

SOURCE = Path(__file__).with_name("kernels.c")
SHIPPED = Path(__file__).with_name("compiled")  # what the wheel brings along
DTYPES = {"float32": (), "bfloat16": ("-DREAL_IS_BFLOAT16",)}
_FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
_GCC_FLAGS = (
    "-fopenmp",  # clang's OpenMP is another than torch's
    # Fused multiply-adds everywhere or nowhere: for some processors GCC leaves out those of single chains, and then one
    # token's sums are not those of three.
    "--param=avoid-fma-max-bits=0",
)
_NAMES = ("gcc", "cc", "clang")
_SEAL = b"lora_serve kernels, SHA-256 "  # after the ELF file, of which the loader reads no more than its headers say


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler of this machine."""

    path: str
    is_gcc: bool
    machine: str  # that it compiles for: "x86_64", "aarch64"


def find() -> Compiler | None:
    """$CC, else gcc, cc or clang: gcc before clang, whose kernels run on one thread."""
    for name in (os.environ.get("CC"), *_NAMES):
        if name and (path := shutil.which(name)):
            is_clang = "clang" in _output(path, "--version").lower()
            return Compiler(path, not is_clang, _output(path, "-dumpmachine").partition("-")[0])
    return None


def flags(level: Level, dtype: str) -> tuple[str, ...]:
    """The flags of a variant, to which each compiler adds its own; `dtype` is a key of DTYPES."""
    return (*_FLAGS, *_GCC_FLAGS, *level.flags, *DTYPES[dtype])


def file_name(level: Level, dtype: str) -> str:
    """A name with the digest of all that the compiled kernels depend on."""
    texts = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    identity = repr((texts, flags(level, dtype)))
    return f"kernels-{level.name}-{dtype}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def variants(machine: str) -> list[tuple[Level, str]]:
    """The levels and types of numbers that a wheel for `machine` brings kernels of."""
    levels = X86_LEVELS if machine == "x86_64" else (GENERIC,)
    return [(level, dtype) for dtype in DTYPES for level in levels if serving(level, dtype) is level]


def is_whole(library: Path) -> bool:
    """True for a file as `compile_kernels` left it: loading a part of one would end the process. Raises OSError."""
    content, mark, digest = library.read_bytes().rpartition(_SEAL)
    return bool(mark) and digest == hashlib.sha256(content).digest()


def compile_kernels(compiler: Compiler, level: Level, dtype: str, target: Path) -> None:
    """Compiles into a temporary file and renames it, so that two servers starting at once never read half a file.

    A seal at its end tells a whole file from a part of one, e.g. of a full disk (`is_whole`). Linked with no OpenMP
    runtime: see `one_thread.h`. Raises OSError or SubprocessError with the reason.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    given = [flag for flag in flags(level, dtype) if compiler.is_gcc or flag not in _GCC_FLAGS]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        item, library = Path(folder) / "item.o", Path(folder) / "library.so"
        for arguments in (
            [*given, "-c", str(SOURCE), "-o", str(item)],
            ["-shared", str(item), "-lm", "-o", str(library)],
        ):
            done = subprocess.run([compiler.path, *arguments], capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler.path} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        _seal(library)
        library.replace(target)


def _seal(library: Path) -> None:
    with library.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(_SEAL + digest)
        file.flush()
        os.fchmod(file.fileno(), 0o755)  # whatever the umask: nobody else may change it
        os.fsync(file.fileno())  # else a machine that stops may keep its name without its content


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
