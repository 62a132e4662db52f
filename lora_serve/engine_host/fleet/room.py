"""Room on this machine for a cluster of the server's own, looked at before Ray starts: it has no other machine."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.model.system.process import free_in_container

ENGINE_BYTES = 250 * 2**20  # of a process's own at least, for Python, torch and Ray; with the demo model it has 285 MiB
_MEMORY = Path("/proc/meminfo")
_GIB = 2**30
_ROUNDING = 1e-9
_log = logging.getLogger(__name__)


def check_own_room(config: FleetConfig) -> None:
    """Raises ConfigError if so many engines can never run here; warns if they can, and would be in each other's way.
    Ray is imported.
    """
    least, most = config.min_replicas, config.max_replicas
    _check_memory(least, most, free_memory())
    if config.num_gpus:
        _check_gpus(least, most, config.num_gpus, num_gpus())
    cores = len(os.sched_getaffinity(0))
    if not config.num_gpus and most > cores:
        _log.warning("%d engines take turns on %d cores: more engines than cores are no faster", most, cores)


def _check_memory(least: int, most: int, free: int | None) -> None:
    if free is None or most * ENGINE_BYTES <= free:
        return
    words = (
        f"of {ENGINE_BYTES >> 20} MiB each at least, before weights and KV cache; {free / _GIB:.1f} GiB are free, "
        f"enough for {free // ENGINE_BYTES}"
    )
    if least * ENGINE_BYTES > free:
        raise ConfigError(f"--replicas {least}: there is no memory here for {least} engines {words}")
    _log.warning("there is no memory here for %d engines, as many as there may be, %s", most, words)


def _check_gpus(least: int, most: int, each: float, found: int) -> None:
    fit = int(found / each) if each >= 1 else found * int(1 / each + _ROUNDING)  # a part of a GPU is one GPU's
    words = f"of {each:g} GPUs each; Ray finds {found} GPUs here, enough for {fit}"
    if least > fit:
        raise ConfigError(f"--num-gpus {each:g}: there is no room here for {least} engines {words}")
    if most > fit:
        _log.warning("there is no room here for %d engines, as many as there may be, %s", most, words)


def free_memory() -> int | None:
    """Bytes that processes can still have here, swap included; None where the kernel does not say."""
    try:
        lines = [line.split() for line in _MEMORY.read_text().splitlines()]
        found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        machine = found["MemAvailable"] + found["SwapFree"]
    except (OSError, ValueError, LookupError):
        return free_in_container()
    container = free_in_container()
    return machine if container is None else min(machine, container)


def num_gpus() -> int:
    """The GPUs that `ray start` would find on this machine."""
    manager = importlib.import_module("ray._private.accelerators").get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    found = int(manager.get_current_node_num_accelerators())
    return found if visible is None else min(found, len(visible))
