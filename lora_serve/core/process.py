"""This process: its collector, threads and machine, and what its children are told."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PREFIX = "LORA_SERVE_"
KERNELS = "LORA_SERVE_KERNELS"  # the level of the native kernels: no setting, and for every process of this machine


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without settings (LORA_SERVE_X), as there are secrets among them; KERNELS stays."""
    return {name: text for name, text in environment.items() if not name.startswith(PREFIX) or name == KERNELS}


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


@contextmanager
def without_collections() -> Iterator[None]:
    """Turns the collector off inside a block whose objects stay, such as imports: an eighth of their time is its."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PatientThreads(ThreadPoolExecutor):
    """See ThreadPoolExecutor, which refuses work whenever it cannot start a thread; this one only while it has none."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
