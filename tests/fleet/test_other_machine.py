"""Engines that do not see their gateway's files: a cluster in a mount namespace of its own, where the folder with the
server's store is hidden.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.answers import answer
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.engine_choice import hosted_by
from tests.oracle import save_adapter

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

HEAD = """
import json, subprocess, sys
from lora_serve.engine_host.fleet.node import own_head
from tests.ray_cluster import ROOM
subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1]], check=True)
with own_head(ROOM) as (node, variables):
    print(json.dumps({**variables, "RAY_ADDRESS": node.address}), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that engines see empty."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[dict[str, str]]:
    """The variables of who joins it."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", HEAD, str(hidden)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        assert head.stdin is not None
        line = head.stdout.readline()
        assert line, "there is no mount namespace to be had, or Ray did not start"
        yield json.loads(line)
        head.stdin.close()
        head.wait(60)


def flags(site: Site, store: Path) -> list[str]:
    given = site.arguments("none")
    given[given.index("--store") + 1] = str(store)
    return [*given, "--warmup", "off"]


FLEET = ["--engine", "ray", "--ray-address", "auto", "--fleet-name", "elsewhere", "--cpus-per-replica", "0.5"]
KINDS = {
    "late/plain": {},
    "late/pissa": {"init_lora_weights": "pissa"},  # converted beside the model
    "late/dora": {"use_dora": True},
}


@pytest.fixture(scope="module")
def late(files: Site) -> dict[str, Path]:
    return {
        name: save_adapter(files.model, files.root / name, seed=61 + seed, r=4, std=0.2, **more)
        for seed, (name, more) in enumerate(KINDS.items())
    }


def answers_of(server: ServerProcess, late: dict[str, Path]) -> dict[str, object]:
    """Registers the adapters, and asks them; the base, too."""
    for name, folder in late.items():
        added = call(f"{server.url}/admin/adapters", {"id": name, "source": str(folder)}, ADMIN)
        assert added.status == 201, added
    return {name: answer(server, name) for name in ("tiny", *late)}


def test_adapters_are_registered_served_and_deleted_as_with_an_engine_in_a_thread(
    files: Site,
    hidden: Path,
    cluster: dict[str, str],
    late: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosted_by("thread").serving(flags(files, tmp_path / "thread"), tmp_path / "thread.log") as server:
        expected = answers_of(server, late)
    assert len({str(one) for one in expected.values()}) == len(expected)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    store = hidden / "store"
    with ServerProcess([*flags(files, store), *FLEET, "--replicas", "2"], tmp_path / "fleet.log") as server:
        server.wait_until_ready(300)
        assert answers_of(server, late) == expected
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    # New engines have nothing but what they ask the server for.
    again = ["elsewhere-again" if flag == "elsewhere" else flag for flag in FLEET]
    with ServerProcess([*flags(files, store), *again, "--replicas", "1"], tmp_path / "again.log") as server:
        server.wait_until_ready(300)
        assert {name: answer(server, name) for name in expected} == expected
        for name in late:
            assert call(f"{server.url}/admin/adapters/{name}", headers=ADMIN, method="DELETE").status == 200
            gone = call(f"{server.url}/v1/completions", {"model": name, "prompt": [5]})
            assert gone.status == 404, gone.text
    copies = Path(cluster["RAY_AUTH_TOKEN_PATH"]).parent.glob("**/lora_serve-*/blobs/*/adapter_model.safetensors")
    assert len({path.parent.name for path in copies}) == len(late)
