"""What every report holds: the machine and its versions, and percentiles."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lora_serve

PACKAGES = ("torch", "transformers", "peft", "aiohttp")


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Seconds in, ms out; nearest rank; zeros of nothing."""
    ordered = sorted(seconds) or [0.0]
    return {
        f"p{share}": round(1000 * ordered[int(share / 100 * (len(ordered) - 1) + 0.5)], 2) for share in (50, 90, 99)
    }


def machine() -> dict[str, Any]:
    """What ran this: processor, memory, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_field("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "bf16_instructions": "avx512_bf16" in _cpu_field("flags"),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES} | {"lora_serve": lora_serve.__version__},
    }


def _cpu_field(field: str) -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(field)), "unknown")
