"""`native.c` through ctypes for short segments (decode), matrix products for long ones (prefill).

The file is compiled once per machine with the C compiler at hand (under a second) and kept in the user's cache
folder. Where there is no compiler, `why_not` says so and the loop kernel serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.core.errors import ConfigError
from lora_serve.model.lora_kernels import loop
from lora_serve.model.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-fno-math-errno",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
)


def why_not(slots: LoraSlots) -> str | None:
    """Why this kernel cannot serve `slots`; None: it can."""
    if slots.device.type != "cpu":
        return "runs on the CPU only"
    try:
        _library()
    except (OSError, subprocess.SubprocessError) as error:
        return f"could not be compiled: {error}"
    return None


class Kernel:
    """See `LoraKernel`."""

    def __init__(self, slots: LoraSlots) -> None:
        reason = why_not(slots)
        if reason is not None:
            raise ConfigError(f"--lora-kernel native: {reason}")
        self._add = _library().lora_add
        self._slots = slots
        self._loop = loop.Kernel(slots)
        tables = slots.tables
        self._addresses = [
            tuple(
                table[module].data_ptr()
                for table in (tables.a, tables.b, tables.rank, tables.scale, tables.is_bfloat16)
            )
            for module in range(len(slots.module_index))
        ]

    def add(self, y: Tensor, x: Tensor, module: int, tokens: LoraTokens) -> None:
        if tokens.long_segments:
            self._loop.add_segments(y, x, module, tokens.long_segments)
        if not tokens.has_short:
            return
        wide_x = x.float() if x.dtype != torch.float32 else x
        wide_y = y.float() if y.dtype != torch.float32 else y
        self._add(
            wide_x.data_ptr(), wide_x.stride(0), wide_y.data_ptr(), wide_y.stride(0),
            x.shape[0], x.shape[1], y.shape[1], tokens.short_slots.data_ptr(), *self._addresses[module],
        )  # fmt: skip
        if wide_y is not y:
            y.copy_(wide_y)


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled `native.c`, made on first use. Raises OSError or SubprocessError with the reason."""
    runtime = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    identity = repr((_SOURCE.read_bytes(), _FLAGS, [str(path) for path in runtime], platform.processor(), _cpu_flags()))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lora_serve"
    target = cache / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(target, runtime)
    library = ctypes.CDLL(str(target))
    address, size = ctypes.c_void_p, ctypes.c_int64
    library.lora_add.argtypes = [address, size, address, size, size, size, size, *[address] * 6]
    library.lora_add.restype = None
    return library


def _compile(target: Path, runtime: list[Path]) -> None:
    """Compile into a temporary file and rename, so that two servers starting at once do not meet half a file.

    Linked with torch's own OpenMP runtime: a second one would fight it for the cores. Without it: one thread.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) was found")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        item, library = Path(folder) / "native.o", Path(folder) / "native.so"
        openmp = ["-fopenmp"] if runtime else []
        for arguments in (
            [compiler, *_FLAGS, *openmp, "-c", str(_SOURCE), "-o", str(item)],
            [compiler, "-shared", str(item), *map(str, runtime[:1]), "-o", str(library)],
        ):
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        library.replace(target)


def _cpu_flags() -> str:
    """What `-march=native` depends on, so that a cache folder shared by unlike machines stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
