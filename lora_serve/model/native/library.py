"""The compiled kernels of this process: one library per type of numbers, at the level of the processor at hand."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_serve.model.native import compiler, levels
from lora_serve.model.system.threads import openmp_path

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """Which kernels serve."""

    level: str
    bfloat16_order: str  # `dot` or `blocks`
    source: str  # where they came from, or why there are none


@functools.cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels whose `real` is `dtype`. Raises OSError or SubprocessError with the reason, ConfigError."""
    level, name, openmp = levels.current(), _NAMES[dtype], openmp_path()
    file = compiler.file_name(level, name)
    place = _cache() / (file if openmp else f"one-thread-{file}")
    if not place.exists():
        compiler.compile_kernels(level, name, place, openmp)
    return ctypes.CDLL(str(place))


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot serve tensors of `device` and `dtype`; None: they can."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype not in _NAMES:
        return f"knows {' and '.join(_NAMES.values())}, not {str(dtype).removeprefix('torch.')}"
    return problem(dtype)


@functools.cache
def problem(dtype: torch.dtype) -> str | None:
    """The reason why there is no library; None: there is. Tried once: a failure would repeat at every layer."""
    try:
        load(dtype)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"could not be compiled: {error}"
    return None


def description(dtype: torch.dtype = torch.float32) -> KernelDescription:
    """The kernels of `dtype`, which are loaded if they are not yet. Raises ConfigError."""
    level, reason = levels.current(), problem(dtype)
    return KernelDescription(level.name, level.bfloat16_order, "compiled here" if reason is None else f"none: {reason}")


def forget() -> None:
    """Forgets what was loaded and what failed: the next call looks again."""
    load.cache_clear()
    problem.cache_clear()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_serve"
