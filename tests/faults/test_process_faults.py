"""kill -9 of the server or of its engine at any moment: what was acknowledged is there, and no answer is wrong."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from tests.canary.asking import Canaries
from tests.canary.questions import World
from tests.canary.watch import Watch
from tests.e2e.processes import children_of, engine_of, eventually, is_alive
from tests.engine_choice import EngineHost
from tests.faults.changing import Changes
from tests.faults.outside import arguments, ask_all
from tests.oracle import save_adapter

pytestmark = pytest.mark.timeout(600)  # each starts several servers


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


def test_server_killed_at_any_moment_loses_nothing_that_was_acknowledged(
    engine_host: EngineHost, world: World, canaries: Canaries, folder: Path, tmp_path: Path
) -> None:
    """A life ends at any moment of registrations and deletions, and the next one finds all there is."""
    changes, generator = Changes(folder), random.Random(3)
    for life in range(2):
        flags = arguments(world, tmp_path / "store", is_first=life == 0)
        with engine_host.serving(flags, tmp_path / f"log-{life}") as process:
            ask_all(process, canaries)
            changes.assert_kept(process)
            timer = threading.Timer(generator.uniform(0.05, 0.6), os.kill, (process.pid, signal.SIGKILL))
            changes.until_dead(process, f"life{life}", lambda number, timer=timer: number == 4 and timer.start())
            timer.join()
            assert process.wait() == -signal.SIGKILL
    assert changes.num_done >= 8


@pytest.mark.nightly  # by day: tests/e2e/test_engine_process.py
@pytest.mark.engines("process", alone="the engine's process is killed")
@pytest.mark.parametrize("num_kills", [1, 4])
def test_engine_killed_at_random_moments_costs_503s_and_its_server_takes_it_along(
    engine_host: EngineHost, world: World, canaries: Canaries, folder: Path, tmp_path: Path, num_kills: int
) -> None:
    """While canaries ask and adapters come and go. Then the server is killed: what it acknowledged is there again."""
    changes, generator = Changes(folder), random.Random(4)
    with engine_host.serving(arguments(world, tmp_path / "store", is_first=True), tmp_path / "log") as process:
        changing = threading.Thread(target=changes.until_dead, args=(process, "some", lambda number: None))
        with Watch(process.url, canaries, may_refuse=True, pause=0.05) as watch:
            changing.start()
            for _ in range(num_kills):
                threading.Event().wait(generator.uniform(0.2, 1.0))  # the random moment
                os.kill(old := engine_of(process.pid), signal.SIGKILL)
                eventually(lambda old=old: children_of(process.pid) not in ([], [old]), "no new engine")
                eventually(process.is_ready, "it does not come back")
        assert watch.verdict.faults == []
        assert watch.verdict.num_right >= 12
        before = changes.num_done
        eventually(lambda: changes.num_done > before + 4, "no adapter can be registered any more")
        engine = engine_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        changing.join()
        eventually(lambda: not is_alive(engine), "the engine outlives its server")
    with engine_host.serving(arguments(world, tmp_path / "store", is_first=False), tmp_path / "again") as process:
        changes.assert_kept(process)
        ask_all(process, canaries)
