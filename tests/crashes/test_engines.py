"""Engines that die at any touch of the store, which is their server's: a process of its own, and a fleet's replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.canary.asking import Canaries, Verdict
from tests.canary.fixtures import canaries, known_world, world
from tests.canary.house import ADMIN, KEY
from tests.canary.questions import BASE, World
from tests.crashes.crashing import Points
from tests.e2e.plain_http import call
from tests.e2e.processes import eventually
from tests.engine_choice import hosted_by

__all__ = ["canaries", "known_world", "world"]
NAME = "acme/a"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("host", ["process", "ray"])
def test_engine_that_dies_at_any_touch_of_the_store_leaves_it_whole(
    world: World, canaries: Canaries, library: Path, tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine writes what it prepared of an adapter into its server's store. `points` count in the engines alone."""
    store, points = tmp_path / "store", Points(tmp_path / "points")
    points.begin()
    for name, text in points.environment(library, store).items():
        monkeypatch.setenv(name, text)
    flags = [
        "--model", str(world.model), "--served-model-name", BASE, "--admin-key", KEY, "--store", str(store),
        "--adapter-root", str(world.root), "--max-model-len", "96", "--kv-cache-memory", "4MiB", "--warmup", "off",
        "--engine-max-restarts", "500", "--lora-modules", *world.modules(),
    ]  # fmt: skip
    if host == "ray":
        flags += ["--replicas", "2", "--cpus-per-replica", "0.5"]
    with hosted_by(host).serving(flags, tmp_path / "log") as server:
        points.spare(server.pid)
        kill_in, num_kills = 1, 0
        while True:
            _make_cold(server.url, store)
            points.kill_in(kill_in)
            _ask_until_all_are_right(server.url, canaries)
            # What was prepared is written behind the answer.
            eventually(lambda: points.has_killed or _is_prepared(server.url, store), "nothing is prepared")
            if not points.has_killed:
                break
            num_kills += 1
            kill_in += 2  # after each death the next engine is waited for longer
            eventually(server.is_ready, "it does not come back")
            print(f"{host}: {num_kills} kills")
        assert num_kills >= 3
        eventually(lambda: not list((store / "tmp").iterdir()), "an engine has left files behind")
        assert not [path for path in store.glob("blobs/*/*") if path.name.endswith((".new", ".tmp"))]
        assert server.exit_code is None


def _make_cold(url: str, store: Path) -> None:
    """No engine has the adapter, and nothing of what was prepared of it is there."""
    eventually(lambda: _evicted(url, NAME), "it cannot be evicted")
    for path in _prepared(url, store):
        path.unlink()


def _is_prepared(url: str, store: Path) -> bool:
    return bool(_prepared(url, store))


def _prepared(url: str, store: Path) -> list[Path]:
    digest = call(f"{url}/admin/adapters/{NAME}", headers=ADMIN).json["digest"]
    return list((store / "blobs" / digest.removeprefix("sha256:")).glob("prepared-*"))


def _evicted(url: str, name: str) -> bool:
    return call(f"{url}/admin/adapters/{name}/evict", headers=ADMIN, method="POST").status == 200


def _ask_until_all_are_right(url: str, canaries: Canaries) -> None:
    """While an engine is away some are refused; none is ever wrong."""

    def is_right() -> bool:
        verdict = Verdict()
        asyncio.run(canaries.round(url, verdict, may_refuse=True))
        assert verdict.faults == []
        return verdict.num_refused == 0

    eventually(is_right, "somebody is refused for ever")
