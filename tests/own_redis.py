"""A redis-server of our own on a free port."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def own_redis(folder: Path) -> Iterator[str]:
    """Its URL, for as long as the block lasts."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log) as server:
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


def _wait_for(port: int) -> None:
    with redis.Redis(port=port, socket_connect_timeout=1) as client:
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:
                threading.Event().wait(0.05)
            else:
                return
    raise TimeoutError("redis-server did not come up")
