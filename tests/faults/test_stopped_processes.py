"""SIGSTOP and SIGCONT of each process of a server, one after another, while it is asked: whoever waits is answered
right once it goes on, or told to come again, and the probes say how it is meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.fleet.engines import command_of
from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries
from tests.canary.questions import World
from tests.e2e.processes import descendants_of, eventually, until_replaced
from tests.engine_choice import EngineHost
from tests.faults.outside import arguments, ask_all, asking, engines_of, pause, probe, stopped
from tests.ray_cluster import RayCluster

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]  # by day: tests/engine_host/test_supervisor.py
HUNG = 3.0  # seconds until an engine counts as hung, here
SOON = 2.0  # seconds: less than anybody waits
LATE = 25.0  # seconds: longer than a replica waits for its gateway's word, and a gateway for a replica's


@pytest.fixture(scope="module")
def server(engine_host: EngineHost, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("stopped")
    flags = [*arguments(world, folder / "store", is_first=True), "--engine-step-timeout", str(HUNG)]
    with engine_host.serving(flags, folder / "log") as process:
        yield process


@pytest.mark.engines("thread", nightly=["process"])
@pytest.mark.parametrize("seconds", [SOON, LATE])
def test_server_that_stood_still_answers_whoever_waited(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost, seconds: float
) -> None:
    """What it then finds overdue is its own doing: no engine is replaced for it."""
    engines, told_before = engines_of(server, engine_host), len(server.log.read_text())
    with asking(server, canaries, may_refuse=False):
        pause(0.5)
        with stopped([server.pid]):
            assert (probe(server, "/health"), probe(server, "/ready")) == (None, None)
            pause(seconds - 2)
        eventually(lambda: (probe(server, "/health"), probe(server, "/ready")) == (200, 200), "it does not go on")
        pause(HUNG + 2)
    assert engines_of(server, engine_host) == engines
    assert "hangs" not in server.log.read_text()[told_before:]


@pytest.mark.engines("process", also=["ray"], alone="the engine's process is stopped")
def test_engine_that_stands_still_for_a_moment_delays_answers_only(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    engines = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=False):
        for engine in engines:
            pause(0.3)
            with stopped([engine]):
                pause(SOON)
                assert (probe(server, "/health"), probe(server, "/ready")) == (200, 200)
    assert engines_of(server, engine_host) == engines


@pytest.mark.engines("process", alone="a supervisor replaces its engine")
def test_engine_that_stands_still_for_long_is_replaced_and_ready_says_so(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    (old,) = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=True) as watch:
        with stopped([old]):
            eventually(lambda: probe(server, "/ready") == 503, "it says that it is ready")
            assert probe(server, "/health") == 200
            until_replaced(server, old)
        pause(1)
    assert watch.verdict.num_refused > 0
    ask_all(server, canaries)


@pytest.mark.engines("ray", alone="there are several engines")
def test_replica_that_stands_still_for_long_costs_no_answer(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    """The others answer for it; it is there again when it goes on, or another is in its place."""
    engines = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=False):
        pause(0.5)
        with stopped(engines[:1]):
            pause(LATE)
            assert (probe(server, "/health"), probe(server, "/ready")) == (200, 200)
        eventually(lambda: len(engines_of(server, engine_host)) == len(engines), "a replica is missing")
    ask_all(server, canaries)


@pytest.mark.engines("ray", alone="there are several engines")
def test_fleet_that_stands_still_says_so_and_goes_on(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    engines = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=True):
        pause(0.5)
        with stopped(engines):
            eventually(lambda: probe(server, "/ready") == 503, "it says that it is ready")
            assert probe(server, "/health") == 200
        eventually(lambda: probe(server, "/ready") == 200, "it does not go on")
        eventually(lambda: len(engines_of(server, engine_host)) == len(engines), "a replica is missing")
    ask_all(server, canaries)


OF_THE_CLUSTER = {"raylet": "raylet/raylet ", "head": "gcs/gcs_server ", "controller": "ray::ServeController"}


@pytest.mark.engines("ray", alone="it has a cluster")
@pytest.mark.parametrize("name", OF_THE_CLUSTER)
def test_process_of_the_cluster_that_stands_still_delays_no_answer(
    server: ServerProcess,
    canaries: Canaries,
    engine_host: EngineHost,
    ray_cluster: Callable[[], RayCluster],
    name: str,
) -> None:
    """Tokens go past it."""
    engines = engines_of(server, engine_host)
    pids = [pid for pid in descendants_of(ray_cluster().root) if OF_THE_CLUSTER[name] in command_of(pid)]
    assert len(pids) == 1, name
    with asking(server, canaries, may_refuse=False) as watch:
        pause(0.5)
        with stopped(pids):
            pause(1)
            before = watch.verdict.num_right
            pause(LATE)
            assert watch.verdict.num_right >= before + 24, "nobody is answered meanwhile"
            assert (probe(server, "/health"), probe(server, "/ready")) == (200, 200)
        pause(5)
        eventually(lambda: len(engines_of(server, engine_host)) == len(engines), "a replica is missing")
        eventually(lambda: probe(server, "/ready") == 200, "it does not go on")
    assert server.exit_code is None
    ask_all(server, canaries)
