"""The wall clock of a server's processes is set while it runs, below Python: answers, deadlines and changes go on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN
from tests.canary.questions import BASE, World
from tests.e2e.plain_http import call
from tests.engine_choice import EngineHost
from tests.faults.outside import arguments, ask_all, asking, engines_of, pause, probe
from tests.oracle import save_adapter

pytestmark = [
    pytest.mark.nightly,  # by day: tests/faults/test_clock_faults.py
    pytest.mark.timeout(600),
    pytest.mark.engines("thread", nightly=["process"]),
]
DAY = 86_400
JUMPS = {"a_day_on": DAY, "a_day_back": -DAY, "1980": -1_460_000_000, "2150": 4_000_000_000}


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What it holds is added to the time of what this process starts; a fleet's engines keep their machine's own."""
    folder = tmp_path_factory.mktemp("clock")
    library = folder / "set_clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", Path(__file__).with_name("set_clock.c"), "-o", library, "-ldl"], check=True
    )
    (folder / "added").write_text("0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("CLOCK_FILE", str(folder / "added"))
        yield folder / "added"


@pytest.fixture(scope="module")
def server(
    engine_host: EngineHost, world: World, clock: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("jumping")
    flags = [*arguments(world, folder / "store", is_first=True), "--engine-step-timeout", "5"]
    with engine_host.serving(flags, folder / "log") as process:
        yield process


def seconds_of(process: ServerProcess) -> float:
    """When the server says an answer was made."""
    body = {"model": BASE, "prompt": "what time is it", "max_tokens": 2, "timeout_ms": 60_000}
    reply = call(f"{process.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    return float(reply.json["created"])


@pytest.mark.parametrize("jump", JUMPS)
def test_clock_that_is_set_under_a_server_changes_no_answer(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost, clock: Path, world: World, jump: str
) -> None:
    folder = save_adapter(world.model, world.root / "adapters" / f"clock-{jump}", seed=80 + len(jump), std=0.2, r=4)
    engines, name = engines_of(server, engine_host), f"clock/{jump}"
    try:
        with asking(server, canaries, may_refuse=False):
            clock.write_text(str(JUMPS[jump]))
            assert abs(seconds_of(server) - time.time() - JUMPS[jump]) < 60, "the clock was not set"
            assert call(f"{server.url}/admin/adapters", {"id": name, "source": str(folder)}, ADMIN).status == 201
            pause(8)
            assert (probe(server, "/health"), probe(server, "/ready")) == (200, 200)
            clock.write_text("0")
            assert abs(seconds_of(server) - time.time()) < 60
            assert call(f"{server.url}/admin/adapters/{name}", headers=ADMIN, method="DELETE").status == 200
    finally:
        clock.write_text("0")
    assert engines_of(server, engine_host) == engines, "an engine was replaced"
    ask_all(server, canaries)
    lines = call(f"{server.url}/admin/audit?limit=100", headers=ADMIN).json["data"]
    assert [line["time"] for line in lines] == sorted((line["time"] for line in lines), reverse=True)
