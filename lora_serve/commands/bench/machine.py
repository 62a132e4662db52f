"""Describes the machine and the versions that a figure was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lora_serve


def machine() -> dict[str, Any]:
    """The load generator's machine; with --spawn also the server's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_field("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "bf16_instructions": "avx512_bf16" in _cpu_field("flags"),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of this project and of the installed libraries that matter."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"lora_serve": lora_serve.__version__}


def _cpu_field(field: str) -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(field)), "unknown")
