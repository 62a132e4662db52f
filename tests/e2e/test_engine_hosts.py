"""Wherever the engine runs, the server answers as with an engine in a thread of its own, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_serve.commands.server_process import ServerProcess
from lora_serve.model.native import compiler
from tests.e2e.answers import NAMES, answer
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("process")


@pytest.fixture(scope="module")
def threaded(servers: Callable[[Site], ServerProcess], files: Site) -> ServerProcess:
    return servers(files)


def test_answers_are_those_of_an_engine_in_a_thread(server: ServerProcess, threaded: ServerProcess) -> None:
    for name in NAMES:
        assert answer(server, name) == answer(threaded, name), name


def test_version_tells_the_kernels_of_the_engines_process(server: ServerProcess, threaded: ServerProcess) -> None:
    kernels = call(f"{server.url}/version").json["kernels"]
    assert kernels == call(f"{threaded.url}/version").json["kernels"]
    assert kernels["level"] in compiler.LEVELS
    assert kernels["source"] == "compiled"
    assert f"kernels: {kernels['level']}, compiled here" in server.log.read_text()


def test_adapters_registered_while_it_runs_are_served(
    server: ServerProcess, threaded: ServerProcess, site: Site
) -> None:
    for name, kind in {"late/dora": {"use_dora": True}, "late/pissa": {"init_lora_weights": "pissa"}}.items():
        folder = save_adapter(site.model, site.root / name, seed=9, r=4, lora_alpha=8, **kind)
        for process in (server, threaded):
            reply = call(f"{process.url}/admin/adapters", {"id": name, "source": str(folder)}, ADMIN)
            assert reply.status == 201, reply.text
        assert answer(server, name) == answer(threaded, name)
