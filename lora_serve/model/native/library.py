"""The compiled kernels of this process: one library per type of numbers, at the level of the processor at hand.

Looked for in the wheel, then among those that this machine compiled before; else they are compiled now. Both are found
by a name with the digest of their sources, so that those of other sources are never taken.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
from pathlib import Path

import torch

from lora_serve.core.model_spec import KernelDescription
from lora_serve.model.native import compiler, levels
from lora_serve.model.system.threads import openmp

_log = logging.getLogger(__name__)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels whose `real` is `dtype`. Raises OSError or SubprocessError with the reason, ConfigError."""
    return _loaded(dtype)[0]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot serve tensors of `device` and `dtype`; None: they can. Raises ConfigError."""
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype not in _NAMES:
        return f"knows {' and '.join(_NAMES.values())}, not {str(dtype).removeprefix('torch.')}"
    return _problem(dtype)


def description(dtype: torch.dtype = torch.float32) -> KernelDescription:
    """The kernels that serve a model of `dtype` on the CPU; they are loaded if they are not yet. Raises ConfigError."""
    name = str(dtype).removeprefix("torch.")
    reason = why_not(torch.device("cpu"), dtype)
    if reason is not None:
        return KernelDescription("none", name, "none", "torch", reason)
    level = levels.serving(levels.current(), name)
    order = level.bfloat16_order if dtype == torch.bfloat16 else "plain"
    return KernelDescription(level.name, name, order, _loaded(dtype)[1])


def forget() -> None:
    """Forgets what was loaded and what failed: the next call looks again."""
    _loaded.cache_clear()
    _problem.cache_clear()


@functools.cache
def _problem(dtype: torch.dtype) -> str | None:
    """Tried once: a failure would repeat at every layer of a model."""
    try:
        load(dtype)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return None


@functools.cache
def _loaded(dtype: torch.dtype) -> tuple[ctypes.CDLL, str]:
    """The library, and where it came from."""
    name = _NAMES[dtype]
    level = levels.serving(levels.current(), name)
    openmp()  # its functions are found before the kernels' own
    file = compiler.file_name(level, name)
    for place, source in ((compiler.SHIPPED / file, "shipped"), (_cache() / file, "compiled")):
        if (found := _opened(place)) is not None:
            _warn_of_one_thread(found, "torch's OpenMP runtime was not found")
            return found, source
    found = ctypes.CDLL(str(_compiled(level, name, file)))
    _warn_of_one_thread(found, "clang's OpenMP is another than torch's: install gcc")
    return found, "compiled"


def _warn_of_one_thread(kernels: ctypes.CDLL, reason: str) -> None:
    if kernels.num_threads() < torch.get_num_threads():
        _log.warning("kernels: they run on one core only: %s", reason)


def _opened(place: Path) -> ctypes.CDLL | None:
    if not place.exists():
        return None
    try:
        return ctypes.CDLL(str(place))
    except OSError as error:  # e.g. of a newer C library than this machine's
        _log.warning("kernels: %s cannot be loaded: %s", place, error)
        return None


def _compiled(level: levels.Level, dtype: str, file: str) -> Path:
    """The place of the kernels, compiled here if they are not yet. Raises OSError and SubprocessError."""
    found = compiler.find()
    if found is None:
        raise OSError("no C compiler (gcc, cc or clang) was found")
    place = _cache() / (file if found.is_gcc else f"one-thread-{file}")
    if not place.exists():
        compiler.compile_kernels(found, level, dtype, place)
    return place


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_serve"
