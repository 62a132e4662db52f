"""A Ray cluster of this machine that several gateways join; it ends with the block."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.processes import Child
from lora_serve.commands.server_process import HOST, free_port
from lora_serve.core.child_environment import without_settings

UP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`pid`: of the process below which everything of the cluster runs."""

    address: str
    pid: int


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """One node of this machine, all cores; its log is in `folder`."""
    with ray_node(folder, HOST, ["--head", "--port", str(port := free_port())]) as pid:
        yield Cluster(f"{HOST}:{port}", pid)


@contextmanager
def ray_node(folder: Path, address: str, flags: Sequence[str], inside: Sequence[str] = ()) -> Iterator[int]:
    """The process below which a node's own run, once it belongs to its cluster. `flags`: of `ray start`; `inside`: what
    comes before the command.
    """
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # short: names of sockets have 107 bytes
        command = [
            *inside, str(Path(sys.executable).with_name("ray")), "start", *flags, "--block", "--node-ip-address", address,
            "--temp-dir", temporary, "--include-dashboard", "false", "--disable-usage-stats",
            "--object-store-memory", str(128 * 2**20),
        ]  # fmt: skip
        child = Child(command, folder / f"ray-{address}.log", without_settings(os.environ))
        try:
            _wait_until_up(child, Path(temporary))
            yield child.pid
        finally:
            child.stop()


def _wait_until_up(child: Child, temporary: Path) -> None:
    deadline = time.monotonic() + UP_SECONDS
    while not (temporary / "ray_current_cluster").exists():
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise child.failed("the Ray node did not come up")
        time.sleep(0.1)
