"""A Ray cluster of this machine that several gateways join; it ends with the block."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.processes import Child
from lora_serve.commands.server_process import HOST, free_port
from lora_serve.core.process import without_settings

UP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`pid`: of the process below which everything of the cluster runs."""

    address: str
    pid: int


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """One node of this machine, all cores; its log is in `folder`. Whoever joins is to be started within the block."""
    with (
        own_token(folder),
        ray_node(folder, HOST, ["--head", "--include-dashboard", "false", "--port", str(port := free_port())]) as pid,
    ):
        yield Cluster(f"{HOST}:{port}", pid)


@contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Ray's nodes and servers that are started within the block have a token in common, and ask each other for it. They
    get no other variable of Ray's: one that a cluster of this process left would keep hosts from joining.
    """
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RAY_")}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def ray_node(folder: Path, address: str, flags: Sequence[str], inside: Sequence[str] = ()) -> Iterator[int]:
    """The process below which a node's own run, once it belongs to its cluster. `flags`: of `ray start`; `inside`: what
    comes before the command.
    """
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # short: names of sockets have 107 bytes
        command = [
            *inside, str(Path(sys.executable).with_name("ray")), "start", *flags, "--block",
            "--node-ip-address", address, "--temp-dir", temporary,
            "--disable-usage-stats", "--object-store-memory", str(128 * 2**20),
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
