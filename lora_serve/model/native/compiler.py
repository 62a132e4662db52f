"""Compiles a C file of this folder for the CPU at hand, once per machine, and loads it through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from lora_serve.model.system.process import openmp_path

_FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-fno-math-errno", "-ffp-contract=fast"),
    # Fused multiply-adds everywhere or nowhere: for some processors GCC leaves out those of single chains, and then one
    # token's sums are not those of three.
    "--param=avoid-fma-max-bits=0",
)


@functools.cache
def load_library(source: Path) -> ctypes.CDLL:
    """The compiled `source`, kept in the user's cache folder. Raises OSError or SubprocessError with the reason."""
    runtime = [path for path in (openmp_path(),) if path is not None]
    texts = [path.read_bytes() for path in sorted(source.parent.glob("*.[ch]"))]  # one may include others
    identity = repr((texts, _FLAGS, [str(path) for path in runtime], _cpu_flags()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_serve"
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not (cache / name).exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(source, cache / name, runtime)
    return ctypes.CDLL(str(cache / name))


def why_not(source: Path, device: torch.device) -> str | None:
    """The reason why `source` cannot serve tensors of `device`; None: it can."""
    if device.type != "cpu":
        return "runs on the CPU only"
    return problem(source)


@functools.cache
def problem(source: Path) -> str | None:
    """The reason why `source` cannot be loaded; None: it is. Tried once: a failure would repeat at every layer of a
    model.
    """
    try:
        load_library(source)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"could not be compiled: {error}"
    return None


def _compile(source: Path, target: Path, runtime: list[Path]) -> None:
    """Compiles into a temporary file and renames it, so that two servers starting at once never read half a file.

    Linked with torch's own OpenMP runtime: a second one would fight it for the cores. Without it: one thread.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) was found")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        item, library = Path(folder) / "item.o", Path(folder) / "library.so"
        openmp = ["-fopenmp"] if runtime else []
        for arguments in (
            [compiler, *_FLAGS, *openmp, "-c", str(source), "-o", str(item)],
            [compiler, "-shared", str(item), *map(str, runtime[:1]), "-lm", "-o", str(library)],
        ):
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        library.replace(target)


def _cpu_flags() -> str:
    """The processor's features, on which `-march=native` depends: unlike machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
