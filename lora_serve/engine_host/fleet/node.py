"""A Ray node of this server's own, as a keeper's processes: the head of a cluster, or one without cores that joins a
cluster elsewhere. Whether the machine is large enough for a cluster is looked at before Ray starts.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError, on_one_line
from lora_serve.core.process import without_settings
from lora_serve.core.settings import VLLM_KEY_VARIABLE
from lora_serve.engine_host.fleet import keeper, ray_hooks
from lora_serve.model.system.process import free_in_container

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0  # a machine of two cores that does other work took 9, one that ten others keep busy over 30
OBJECT_STORE_BYTES = 128 * 2**20  # messages are small, and most need no store
SELDOM_METRICS = {"RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000"}  # Ray's own interval; Serve's is 100, also if idle
_MAX_FOLDER = 40  # characters: Ray's sockets lie 66 deeper, and the name of a socket has 107 at most
_SPARE = 2  # times as many cores as the replicas need: an update starts new ones beside the old
_END_SECONDS = 20.0
_MAX_CHARACTERS = 500
_NO_TOKEN = (
    "it asks for a token, and this server has none or another: RAY_AUTH_MODE=token, with the cluster's token in "
    "the file that RAY_AUTH_TOKEN_PATH names, or in RAY_AUTH_TOKEN"
)
_REASONS = {"InvalidAuthToken": _NO_TOKEN, "Unauthenticated": _NO_TOKEN}  # a sign in Ray's words -> ours
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): ")
ENGINE_BYTES = 250 * 2**20  # of a process's own at least, for Python, torch and Ray; with the demo model it has 285 MiB
_MEMORY = Path("/proc/meminfo")
_GIB = 2**30
_ROUNDING = 1e-9
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """A running node of this server's own."""

    address: str  # HOST:PORT of the cluster's GCS
    folder: Path  # that only this user may enter
    process: subprocess.Popen[bytes]

    @property
    def temp_dir(self) -> Path:
        """Ray's temporary folder, which Ray opens to every user of the machine: so it lies in one that is closed."""
        return temp_dir_in(self.folder)

    def ended(self) -> str | None:
        """The reason why it is no longer there, as words; None while it runs."""
        if self.process.poll() is None and not (self.folder / keeper.ENDED).exists():
            return None
        return "Ray's processes on this machine ended"


def temp_dir_in(folder: Path) -> Path:
    return folder / "r"


@contextmanager
def own_head(config: FleetConfig, halted: threading.Event | None = None) -> Iterator[tuple[Node, dict[str, str]]]:
    """A cluster on loopback alone, which always asks for a token; with the variables that a process needs to join it.
    Raises ConfigError; also when `halted` is set meanwhile.
    """
    with _temp_folder() as folder:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        variables = {
            # Ray's word for a cluster of one machine: 127.0.0.1 is not taken for the machine's own address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_enable_metrics_collection": "0",  # Ray's own, which cannot be read here
        }
        failed = "--engine ray: Ray did not start here"
        flags, environment = head_flags(config, folder), head_environment(variables)
        with _started(folder, flags, environment, START_SECONDS, failed, halted) as node:
            yield node, variables


@contextmanager
def joining_node(address: str, halted: threading.Event | None = None) -> Iterator[Node]:
    """A node without cores, through which this process speaks to the cluster at `address`. Raises as `own_head`."""
    with _temp_folder() as folder:
        flags = [f"--address={address}", "--num-cpus=0", "--num-gpus=0", *_common_flags(folder)]
        failed = f"--ray-address {address}: the cluster was not joined"
        with _started(folder, flags, child_environment(), START_SECONDS, failed, halted) as node:
            yield node


def head_flags(config: FleetConfig, folder: Path) -> list[str]:
    """The flags of `ray start` for a cluster of this machine alone, with cores for the fleet's replicas."""
    flags = ["--head", f"--node-ip-address={LOOPBACK}", "--port=0", "--include-dashboard=false", "--no-monitor"]
    flags += ["--disable-usage-stats", f"--num-cpus={math.ceil(_SPARE * config.max_replicas * config.num_cpus)}"]
    flags += [] if config.num_gpus else ["--num-gpus=0"]
    return flags + _common_flags(folder)


def _common_flags(folder: Path) -> list[str]:
    """Ray's objects lie in shared memory, or in files where a container has too little of it."""
    flags = [f"--temp-dir={temp_dir_in(folder)}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    try:
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108
    except OSError:
        free = 0
    flags += [] if free >= 2 * OBJECT_STORE_BYTES else [f"--plasma-directory={folder}"]
    return ["--dashboard-agent-listen-port=0", *flags]


def child_environment() -> dict[str, str]:
    """The variables of Ray's processes: this process's, without settings, as there are secrets among them."""
    kept = {name: text for name, text in without_settings(os.environ).items() if name != VLLM_KEY_VARIABLE}
    no_drain = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # of a node that is to end: no replica runs there by then
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", no_drain: "0"}


def head_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Likewise, for a cluster of this server's own."""
    own = {
        **variables,
        "RAY_START_HOOK": ray_hooks.START_HOOK,
        "DASHBOARD_METRIC_PORT": "-1",  # none: it would answer without a token, and Ray has no switch for it
        "RAY_memory_monitor_refresh_ms": "0",  # a full machine is the kernel's matter, as with any other engine
        "RAY_enable_worker_prestart": "0",  # processes that are not needed
        "RAY_prestart_worker_first_driver": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # a third of the processor time of 0.1, and nothing waits for it
        "RAY_worker_niceness": "0",  # by itself 15: engines would give way to everything else on the machine
        "RAY_ROTATION_MAX_BYTES": str(2**24),
        "RAY_ROTATION_BACKUP_COUNT": "1",
    }
    return {name: text for name, text in child_environment().items() if name != "RAY_ADDRESS"} | own


@contextmanager
def _temp_folder() -> Iterator[Path]:
    """A new folder that only this user may enter, whose path is short enough for Ray's sockets.

    Raises ConfigError.
    """
    near = [path for path in (tempfile.gettempdir(), "/tmp") if len(path) + len("/lora-ray-12345678/r") <= _MAX_FOLDER]  # noqa: S108
    try:
        folder = Path(tempfile.mkdtemp(prefix="lora-ray-", dir=next(iter(near), "/tmp")))  # noqa: S108
    except OSError as error:
        raise ConfigError(f"--engine ray: there is no place for Ray's files: {error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(
    folder: Path,
    flags: list[str],
    environment: dict[str, str],
    seconds: float,
    failed: str,
    halted: threading.Event | None = None,
) -> Iterator[Node]:
    command = [sys.executable, "-I", keeper.__file__, str(folder)]
    command += [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style=record", *flags]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, process_group=0, stdout=subprocess.DEVNULL
    )
    try:
        yield Node(_address(folder, process, seconds, failed, halted or threading.Event()), folder, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:  # it was killed, and the kernel has ended what it had started; what that had may be left
            keeper.end_processes(process.pid)


def _address(
    folder: Path, process: subprocess.Popen[bytes], seconds: float, failed: str, halted: threading.Event
) -> str:
    """The address of the cluster, once the node belongs to it. Raises ConfigError, which begins with `failed`."""
    file, deadline = temp_dir_in(folder) / "ray_current_cluster", time.monotonic() + seconds
    while not (file.exists() and (text := file.read_text().strip())):
        words = last_words(folder / keeper.LOG)
        if process.poll() is not None or (folder / keeper.ENDED).exists() or words in _REASONS.values():
            raise ConfigError(f"{failed}: {words}")
        if time.monotonic() > deadline:
            raise ConfigError(f"{failed} within {seconds:.0f} s: {words}")
        if halted.wait(0.1):
            raise ConfigError(f"{failed}: it was told to stop")
    return text


def last_words(log: Path) -> str:
    """Why `ray start` ended, from its output: our words for what is known, else its last error, else its last lines."""
    try:
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    for sign, reason in _REASONS.items():  # Ray tries for a while what cannot come true
        if any(sign in line for line in lines):
            return reason
    begins = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    last = lines[begins[-1] :] if begins else lines[-4:]
    return " ".join(last)[:_MAX_CHARACTERS] or "it said nothing"


def explained(text: str) -> str:
    """Ray's own words of an error, or ours in their place."""
    return next((reason for sign, reason in _REASONS.items() if sign in text), on_one_line(text))


def check_own_capacity(config: FleetConfig) -> None:
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
