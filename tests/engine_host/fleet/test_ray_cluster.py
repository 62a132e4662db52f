"""Real Ray clusters: where they listen, what they are told, and that they end with the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lora_serve.engine_host.fleet import keeper, node
from tests.e2e.processes import LOOPBACK, listening
from tests.engine_host.fleet.test_keeper import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SECRET = "a-secret-of-the-server"
# A server's process, as far as its cluster goes: prints what it found, and closes the cluster at the end of its input.
SERVER = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.engine_host.fleet.cluster import open_cluster
config = FleetConfig(
    min_replicas=1, max_replicas=1, num_gpus=0.0, num_cpus=1.0, address=sys.argv[1] or None, name="tests", wait=1.0
)
try:
    with open_cluster(config) as cluster:
        import ray
        @ray.remote(num_cpus=1)
        def work():
            print("a line of a worker", flush=True)
            return {**os.environ, "niceness": str(os.nice(0))}
        keeper = cluster.node.process.pid if cluster.node else 0
        found = {"keeper": keeper, "folder": str(cluster.node.folder) if cluster.node else "", "own": cluster.is_own}
        found |= {"environment": ray.get(work.remote()), "cores": ray.cluster_resources()["CPU"]}
        jobs = ray._private.state.jobs()
        print(json.dumps({**found, "jobs": [job["Entrypoint"] for job in jobs]}), flush=True)
        sys.stdin.read()
except ConfigError as error:
    print(json.dumps({"refused": str(error)}), flush=True)
"""


class Server:
    """A process that runs SERVER."""

    def __init__(self, log: Path, address: str = "", **environment: str) -> None:
        self.log = log
        kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, address, f"--admin-key={SECRET}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**kept, "LORA_SERVE_ADMIN_KEY": SECRET, "HOME": str(log.parent), **environment},
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()
        self.found: dict[str, Any] = json.loads(line)

    def pids(self) -> list[int]:
        """Its own process, and those of its cluster."""
        return [self.process.pid, *self.cluster()]

    def cluster(self) -> list[int]:
        """The processes of its session but itself, which have not ended: those of Ray, which the keeper has to find."""
        found = []
        for entry in os.scandir("/proc"):
            with suppress(OSError, ValueError):
                state, _, _, session = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid != int(entry.name) and state not in ("Z", "X"):
                    found.append(int(entry.name))
        return found


@contextmanager
def server(log: Path, address: str = "", **environment: str) -> Iterator[Server]:
    opened = Server(log, address, **environment)
    try:
        yield opened
    finally:
        opened.process.communicate(timeout=60)


def test_a_cluster_of_ones_own_is_this_users_alone_and_ends_with_the_server(tmp_path: Path) -> None:
    with server(tmp_path / "log") as opened:
        found, pids = opened.found, opened.pids()
        assert found["own"]
        assert len(pids) > 6
        addresses = {address for address, _ in listening(pids)}
        assert addresses
        assert addresses <= LOOPBACK
        assert stat.S_IMODE(Path(found["folder"]).stat().st_mode) == 0o700
        for pid in opened.cluster():
            assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET not in json.dumps([found["environment"], found["jobs"]])
        assert (found["environment"]["RAY_AUTH_MODE"], found["cores"]) == ("token", 2.0)
        assert found["environment"]["niceness"] == str(os.nice(0))
        assert until(lambda: "a line of a worker" in opened.log.read_text())
    assert opened.cluster() == []
    assert not Path(found["folder"]).exists()
    lines = opened.log.read_text().splitlines()
    others = [line for line in lines if not line.startswith("INFO lora_serve.engine_host.fleet.output")]
    assert others == ["INFO lora_serve.engine_host.fleet.cluster ending Ray's processes on this machine"]


def test_nothing_of_a_cluster_outlives_a_killed_server(tmp_path: Path) -> None:
    opened = Server(tmp_path / "log")
    os.kill(opened.process.pid, signal.SIGKILL)
    opened.process.communicate()
    assert until(lambda: opened.cluster() == [], 20)
    assert until(lambda: not Path(opened.found["folder"]).exists())


def test_nothing_of_a_cluster_outlives_a_killed_keeper_by_more_than_its_server(tmp_path: Path) -> None:
    with server(tmp_path / "log") as opened:
        os.kill(opened.found["keeper"], signal.SIGKILL)
    assert until(lambda: opened.cluster() == [], 20)


def test_a_ctrl_c_at_the_terminal_reaches_the_server_alone(tmp_path: Path) -> None:
    with server(tmp_path / "log") as opened:
        before = opened.cluster()
        os.killpg(os.getpgid(opened.process.pid), signal.SIGWINCH)  # harmless, and goes where Ctrl-C goes
        groups = {os.getpgid(pid) for pid in before}
        assert len(before) > 5
        assert os.getpgid(opened.process.pid) not in groups


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of somebody else's cluster, which asks for the token `right`."""
    log = tmp_path_factory.mktemp("head")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:  # of a cluster of other tests
            patch.delenv(name)
        environment = node.head_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right" * 8})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--head", f"--port={port}", "--num-cpus=3", "--num-gpus=0", "--include-dashboard=false", "--no-monitor"]
    flags += ["--dashboard-agent-listen-port=0", f"--object-store-memory={node.OBJECT_STORE_BYTES}"]
    with ExitStack() as stack:
        folder = stack.enter_context(node._temp_folder())
        started = stack.enter_context(
            node._started(folder, [*flags, f"--temp-dir={node.temp_dir_in(folder)}"], environment, 60.0, str(log))
        )
        yield started.address


def test_another_cluster_is_joined_through_a_node_without_cores(head: str, tmp_path: Path) -> None:
    with server(tmp_path / "log", head, RAY_AUTH_TOKEN="right" * 8) as opened:
        found = opened.found
        assert (found["own"], found["cores"]) == (False, 3.0)
        assert found["keeper"]
        assert SECRET not in json.dumps([found["environment"], found["jobs"]])
        assert until(lambda: "a line of a worker" in opened.log.read_text())
    assert opened.cluster() == []
    assert not Path(found["folder"]).exists()


def test_a_node_that_is_there_is_used(head: str, tmp_path: Path) -> None:
    with server(tmp_path / "log", "auto", RAY_ADDRESS=head, RAY_AUTH_TOKEN="right" * 8) as opened:
        assert (opened.found["own"], opened.found["keeper"]) == (False, 0)
    assert opened.process.returncode == 0


@pytest.mark.parametrize("environment", [{"RAY_AUTH_TOKEN": "wrong" * 8}, {}])
def test_a_wrong_token_or_none_is_said_within_seconds(head: str, tmp_path: Path, environment: dict[str, str]) -> None:
    start = time.monotonic()
    with server(tmp_path / "log", head, **environment) as opened:
        assert opened.found["refused"].startswith(f"--ray-address {head}: the cluster was not joined: it asks for a")
        assert "RAY_AUTH_TOKEN_PATH" in opened.found["refused"]
    assert time.monotonic() - start < 30


def test_a_node_whose_processes_die_is_known_to_have_ended(tmp_path: Path) -> None:
    with server(tmp_path / "log") as opened:
        pids = opened.cluster()
        (raylet,) = (pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet")
        os.kill(raylet, signal.SIGKILL)
        assert until(lambda: (Path(opened.found["folder"]) / keeper.ENDED).exists(), 30)
    assert opened.cluster() == []
