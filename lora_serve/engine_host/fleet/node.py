"""A Ray node of this server's own, as a keeper's processes: the head of a cluster, or one without cores that joins a
cluster elsewhere.
"""

from __future__ import annotations

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
from lora_serve.core.errors import ConfigError
from lora_serve.core.process import without_settings
from lora_serve.core.settings import VLLM_KEY_VARIABLE
from lora_serve.engine_host.fleet import keeper, start_hook

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0  # a machine of two cores that does other work took 9, one that ten others keep busy over 30
OBJECT_STORE_BYTES = 128 * 2**20  # messages are small, and most need no store
SELDOM_METRICS = {"RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000"}  # Ray's own interval; Serve's is 100, also if idle
_MAX_FOLDER = 40  # characters: Ray's sockets lie 66 deeper, and the name of a socket has 107 at most
_SPARE = 2  # times as much room as the replicas need: an update starts new ones beside the old
_END_SECONDS = 20.0
_MAX_WORDS = 500
_NO_TOKEN = (
    "it asks for a token, and this server has none or another: RAY_AUTH_MODE=token, with the cluster's token in "
    "the file that RAY_AUTH_TOKEN_PATH names, or in RAY_AUTH_TOKEN"
)
_REASONS = {"InvalidAuthToken": _NO_TOKEN, "Unauthenticated": _NO_TOKEN}  # a sign in Ray's words -> ours
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): ")


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
    """A cluster on loopback alone, which asks everybody for a token; with the variables that whoever joins needs.
    Raises ConfigError; also when `halted` is set meanwhile.
    """
    with _folder() as folder:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        variables = {
            # Ray's word for a cluster of one machine: 127.0.0.1 is not taken for the machine's own address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_enable_metrics_collection": "0",  # Ray's own, which nobody can read here
        }
        failed = "--engine ray: Ray did not start here"
        flags, environment = head_flags(config, folder), head_environment(variables)
        with _started(folder, flags, environment, START_SECONDS, failed, halted) as node:
            yield node, variables


@contextmanager
def joining_node(address: str, halted: threading.Event | None = None) -> Iterator[Node]:
    """A node without cores, through which this process speaks to the cluster at `address`. Raises as `own_head`."""
    with _folder() as folder:
        flags = [f"--address={address}", "--num-cpus=0", "--num-gpus=0", "--dashboard-agent-listen-port=0"]
        flags += [
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *_object_store(folder),
            f"--temp-dir={temp_dir_in(folder)}",
        ]
        failed = f"--ray-address {address}: the cluster was not joined"
        with _started(folder, flags, child_environment(), START_SECONDS, failed, halted) as node:
            yield node


def head_flags(config: FleetConfig, folder: Path) -> list[str]:
    """The flags of `ray start` for a cluster of this machine alone, with room for the fleet's replicas."""
    flags = ["--head", f"--node-ip-address={LOOPBACK}", "--port=0", "--dashboard-agent-listen-port=0"]
    flags += ["--include-dashboard=false", "--no-monitor", "--disable-usage-stats"]
    flags.append(f"--num-cpus={math.ceil(_SPARE * config.max_replicas * config.num_cpus)}")
    flags += [] if config.num_gpus else ["--num-gpus=0"]
    flags += [
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *_object_store(folder),
        f"--temp-dir={temp_dir_in(folder)}",
    ]
    return flags


def child_environment() -> dict[str, str]:
    """The variables of Ray's processes: this process's, without settings, as there are secrets among them."""
    kept = {name: text for name, text in without_settings(os.environ).items() if name != VLLM_KEY_VARIABLE}
    no_drain = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # of a node that is told to end: no replica runs there by then
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", no_drain: "0"}


def head_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Likewise, for a cluster of this server's own."""
    own = {
        **variables,
        "RAY_START_HOOK": start_hook.PATH,
        "DASHBOARD_METRIC_PORT": "-1",  # none: it would answer without a token, and Ray has no switch for it
        "RAY_memory_monitor_refresh_ms": "0",  # a full machine is the kernel's matter, as with any other engine
        "RAY_enable_worker_prestart": "0",  # processes that nobody asks for
        "RAY_prestart_worker_first_driver": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # a third of the processor time of 0.1, and nobody waits for it
        "RAY_worker_niceness": "0",  # by itself 15: engines would give way to everything else on the machine
        "RAY_ROTATION_MAX_BYTES": str(2**24),
        "RAY_ROTATION_BACKUP_COUNT": "1",
    }
    return {name: text for name, text in child_environment().items() if name != "RAY_ADDRESS"} | own


@contextmanager
def _folder() -> Iterator[Path]:
    """A new folder that only this user may enter, whose path is short enough for Ray's sockets."""
    near = [path for path in (tempfile.gettempdir(), "/tmp") if len(path) + len("/lora-ray-12345678/r") <= _MAX_FOLDER]  # noqa: S108
    try:
        folder = Path(tempfile.mkdtemp(prefix="lora-ray-", dir=next(iter(near), "/tmp")))  # noqa: S108
    except OSError as error:
        raise ConfigError(f"--engine ray: there is no place for Ray's files: {error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _object_store(folder: Path) -> list[str]:
    """Where Ray's objects lie: in shared memory, or in files where a container has too little of it."""
    try:
        room = shutil.disk_usage("/dev/shm").free  # noqa: S108
    except OSError:
        room = 0
    return [] if room >= 2 * OBJECT_STORE_BYTES else [f"--plasma-directory={folder}"]


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
    told = lines[begins[-1] :] if begins else lines[-4:]
    return " ".join(told)[:_MAX_WORDS] or "it said nothing"


def explained(text: str) -> str:
    """Ray's own words of an error, or ours in their place."""
    return next((reason for sign, reason in _REASONS.items() if sign in text), " ".join(text.split())[:_MAX_WORDS])
