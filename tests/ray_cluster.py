"""A Ray cluster of the tests' own, which many servers join one after another: a start of one takes eight seconds."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lora_serve.core.config import FleetConfig
from lora_serve.engine_host.fleet.node import own_head

ROOM = FleetConfig(min_replicas=32, max_replicas=32, num_gpus=0, num_cpus=1, address=None, name="tests", wait=60)

# Serve's own words, as whoever looks after a cluster has them: they remove applications that servers left there.
JANITOR = """
import sys
import ray
from ray import serve
ray.init(address="auto", configure_logging=False, log_to_driver=False)
print("connected", flush=True)
for name in sys.stdin:
    serve.delete(name.strip())
    print("removed", flush=True)
"""


class RayCluster:
    """The cluster, and who removes what servers leave in it."""

    def __init__(self, root: int, janitor: subprocess.Popen[str]) -> None:
        """`root`: the process below which the cluster's are."""
        self.root = root
        self._janitor = janitor
        self._numbers = itertools.count()
        self._hear("connected")

    @contextmanager
    def fleet(self, replicas: int) -> Iterator[list[str]]:
        """The flags of servers that share engines, which go with the block."""
        name = f"tests-{next(self._numbers)}"
        try:
            yield [
                "--engine", "ray", "--ray-address", "auto", "--fleet-name", name, "--replicas", str(replicas),
                "--cpus-per-replica", "0.5",
            ]  # fmt: skip
        finally:
            self._remove(name)

    def _remove(self, name: str) -> None:
        assert self._janitor.stdin is not None
        self._janitor.stdin.write(f"{name}\n")
        self._janitor.stdin.flush()
        self._hear("removed")

    def _hear(self, words: str) -> None:
        assert self._janitor.stdout is not None
        assert self._janitor.stdout.readline() == f"{words}\n", "the janitor of the Ray cluster ended"


@contextmanager
def running_cluster() -> Iterator[RayCluster]:
    """Servers find it by --ray-address auto as long as the block lasts."""
    with own_head(ROOM) as (node, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "RAY_ADDRESS": node.address}.items():
            patch.setenv(name, value)
        command = [sys.executable, "-c", JANITOR]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as janitor:
            yield RayCluster(node.process.pid, janitor)
