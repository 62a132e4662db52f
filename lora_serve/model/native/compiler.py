"""Compiles `kernels.c` for one level of processor and one type of numbers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lora_serve.model.native.levels import Level

SOURCE = Path(__file__).with_name("kernels.c")
DTYPES = {"float32": (), "bfloat16": ("-DREAL_IS_BFLOAT16",)}
_FLAGS = (
    *("-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast"),
    # Fused multiply-adds everywhere or nowhere: for some processors GCC leaves out those of single chains, and then one
    # token's sums are not those of three.
    "--param=avoid-fma-max-bits=0",
)


def flags(level: Level, dtype: str) -> tuple[str, ...]:
    """The compiler's flags of a variant; `dtype` is a key of DTYPES."""
    return (*_FLAGS, *level.flags, *DTYPES[dtype])


def file_name(level: Level, dtype: str) -> str:
    """A name with the digest of all that the compiled kernels depend on."""
    texts = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    identity = repr((texts, flags(level, dtype)))
    return f"kernels-{level.name}-{dtype}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def compile_kernels(level: Level, dtype: str, target: Path, openmp: Path | None) -> None:
    """Compiles into a temporary file and renames it, so that two servers starting at once never read half a file.

    Linked with torch's own OpenMP runtime: a second one would fight it for the cores. Without it: one thread.
    Raises OSError or SubprocessError with the reason.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) was found")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        item, library = Path(folder) / "item.o", Path(folder) / "library.so"
        parallel = ["-fopenmp"] if openmp else []
        for arguments in (
            [compiler, *flags(level, dtype), *parallel, "-c", str(SOURCE), "-o", str(item)],
            [compiler, "-shared", str(item), *([str(openmp)] if openmp else []), "-lm", "-o", str(library)],
        ):
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        library.replace(target)
