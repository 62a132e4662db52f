"""The machine that this process runs on, and what it sees of its files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")


def machine_id() -> str:
    """Names the machine and its start: `time.monotonic()` is the same for all processes with the same name."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


def files_id() -> str:
    """Names the files that this process sees: processes of the same name may name files to each other by paths. Two
    containers of one machine have two names.
    """
    root, mounts = Path("/").stat(), _MOUNTS.stat().st_ino if _MOUNTS.exists() else 0
    return f"{machine_id()}.{mounts}.{root.st_dev}.{root.st_ino}.{os.geteuid()}"
