"""Levels of processors: which instructions kernels are compiled for, and which of them this machine may run."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from lora_serve.core import child_environment
from lora_serve.core.errors import ConfigError

_log = logging.getLogger(__name__)
VARIABLE = child_environment.KERNELS
_SYSCALL_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # asm/prctl.h: ARCH_REQ_XCOMP_PERM
_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class Level:
    """The instructions that kernels are compiled for; the processor needs all of `features`."""

    name: str
    features: frozenset[str]  # as /proc/cpuinfo spells them
    flags: tuple[str, ...]  # of the compiler
    bfloat16_order: str = "dot"  # of the sums of bfloat16 products: that of VDPBF16PS, or `blocks`, that of TDPBF16PS
    multiplies_bfloat16: bool = False  # faster than float32


GENERIC = Level("generic", frozenset(), ())
X86_LEVELS = (  # the best last
    Level("avx2", _AVX2, ("-march=x86-64-v3",)),
    Level("avx512", _AVX512, ("-march=x86-64-v4",)),
    Level("avx512_bf16", _AVX512_BF16, ("-march=x86-64-v4", "-mavx512bf16"), multiplies_bfloat16=True),
    Level(
        "amx",
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "blocks",
        multiplies_bfloat16=True,
    ),
)
LEVELS = {level.name: level for level in (GENERIC, *X86_LEVELS)}


def current() -> Level:
    """The best level of this machine, or a lower one that LORA_SERVE_KERNELS names. Raises ConfigError."""
    allowed = available()
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return allowed[-1]
    if name not in LEVELS:
        raise ConfigError(f"{VARIABLE}={name}: not one of {', '.join(LEVELS)}")
    if LEVELS[name] not in allowed:
        raise ConfigError(
            f"{VARIABLE}={name}: this machine has not what it needs; possible here: "
            f"{', '.join(level.name for level in allowed)}"
        )
    return LEVELS[name]


def serving(level: Level, dtype: str) -> Level:
    """The level whose kernels serve `dtype` ("float32", "bfloat16") at `level`: float32 needs no bfloat16 products."""
    return LEVELS["avx512"] if dtype == "float32" and level.multiplies_bfloat16 else level


@functools.cache
def available() -> tuple[Level, ...]:
    """The levels that this machine runs, the best last."""
    features = _features()
    found = [level for level in X86_LEVELS if level.features <= features]
    if LEVELS["amx"] in found and not _may_use_tiles():
        found.remove(LEVELS["amx"])
    return (GENERIC, *found)


def _features() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _may_use_tiles() -> bool:
    """Asks the kernel for AMX's registers, as every process must once; its threads and children have them then."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(_SYSCALL_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    _log.warning("kernels: this processor has AMX, but the system refuses its tiles (%s): a lower level serves", reason)
    return False
