"""`--engine process` on a real Redis: the engine does not know where it is, and yet loads what is there only."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import Reply, call
from tests.e2e.processes import PATIENCE, engine_of, eventually, loads_torch, until_replaced
from tests.e2e.test_adapter_kinds import PROMPT, ask, check, register, tokens_of
from tests.oracle import load_alone, save_adapter
from tests.redis_server import RedisServer

pytestmark = pytest.mark.nightly  # by day: tests/engine_host/test_adapter_source.py, tests/client/test_process.py


@dataclass(frozen=True)
class Place:
    """Two servers with engines in processes of their own, and a store each, on one Redis."""

    one: ServerProcess
    other: ServerProcess
    redis: RedisServer
    site: Site

    def blob(self, process: ServerProcess, name: str) -> Path:
        store = "near-one" if process is self.one else "near-other"
        digest = card(process, name)["digest"].removeprefix("sha256:")
        return self.site.root / store / "cache" / "blobs" / digest

    def make_cold(self, process: ServerProcess, name: str) -> Path:
        """Off the device and out of the engine's memory; the folder that is left on this machine."""
        assert call(f"{process.url}/admin/adapters/{name}/evict", {}, ADMIN).status == 200
        scratch = self.blob(process, name).parents[1] / "tmp"
        eventually(lambda: not list(scratch.iterdir()), "a file is still being prepared")
        return self.blob(process, name)

    def remove_record(self, process: ServerProcess, name: str) -> None:
        """What is on this machine of it: all at once, so that a file which is being prepared finds no folder."""
        blob = self.make_cold(process, name)
        aside = blob.rename(blob.parents[1] / "taken away")
        shutil.rmtree(aside)


@pytest.fixture(scope="module")
def place(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"), append_only=True)
    redis.start()
    flags = ["--engine", "process", "--warmup", "off", "--engine-max-restarts", "50", "--redis-url", redis.url]
    try:
        with (
            ServerProcess(site.arguments("near-one", *flags), site.root / "log-one") as one,
            ServerProcess(site.arguments("near-other", *flags), site.root / "log-other") as other,
        ):
            one.wait_until_ready(PATIENCE)
            other.wait_until_ready(PATIENCE)
            yield Place(one, other, redis, site)
    finally:
        redis.stop()


def card(process: ServerProcess, name: str) -> Any:
    return call(f"{process.url}/admin/adapters/{name}", headers=ADMIN).json


def saved(place: Place, name: str, seed: int = 7, **config: Any) -> Path:
    return save_adapter(place.site.model, place.site.root / "adapters" / name, seed=seed, **config)


def until_served(process: ServerProcess, name: str) -> Reply:
    """Replicas hear of a registration in a moment."""
    eventually(lambda: ask(process, PROMPT, model=name).status == 200, f"{name} is not served")
    return ask(process, PROMPT, model=name)


def restarted(process: ServerProcess) -> None:
    old = engine_of(process.pid)
    os.kill(old, signal.SIGKILL)
    until_replaced(process, old)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapter_relative_to_a_changed_base_is_converted_by_the_engine_and_served_by_every_replica(
    place: Place, init: str
) -> None:
    name = f"stores/{init}"
    folder = saved(place, name, init_lora_weights=init)
    assert [register(place.one, name, folder).status for _ in range(2)] == [201, 200]
    oracle = load_alone(place.site.model, folder)
    check(oracle, "default", PROMPT, ask(place.one, PROMPT, model=name))
    check(oracle, "default", PROMPT, until_served(place.other, name))
    found = card(place.other, name)
    assert (found["rank"], found["config"]["converted_from"]["init"]) == (8, init)
    assert register(place.other, name, folder).status == 200  # known as converted before, by whichever server
    assert not loads_torch(place.one.pid)


def test_adapter_that_is_far_only_is_fetched_for_the_engine(place: Place) -> None:
    name = "stores/far"
    folder = saved(place, name, seed=8)
    assert register(place.one, name, folder).status == 201
    oracle = load_alone(place.site.model, folder)
    check(oracle, "default", PROMPT, until_served(place.other, name))
    for process in (place.one, place.other):
        place.remove_record(process, name)
        check(oracle, "default", PROMPT, ask(process, PROMPT, model=name))
        assert place.blob(process, name).is_dir()


def test_near_copy_that_rots_is_mended_from_the_far_one(place: Place) -> None:
    name = "stores/rotten"
    folder = saved(place, name, seed=9)
    assert register(place.one, name, folder).status == 201
    expected = tokens_of(ask(place.one, PROMPT, model=name))
    blob = place.make_cold(place.one, name)
    for prepared in blob.glob("prepared-*"):
        prepared.unlink()
    weights = blob / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    assert tokens_of(ask(place.one, PROMPT, model=name)) == expected
    assert weights.read_bytes() != content


def test_engine_that_starts_again_while_redis_is_away_serves_what_is_near(place: Place) -> None:
    near, far = "stores/near", "stores/away"
    assert register(place.one, near, saved(place, near, seed=10)).status == 201
    assert register(place.one, far, saved(place, far, seed=11)).status == 201
    expected = {name: tokens_of(ask(place.one, PROMPT, model=name)) for name in (near, far)}
    place.remove_record(place.one, far)
    place.redis.kill()
    try:
        restarted(place.one)
        assert tokens_of(ask(place.one, PROMPT, model=near)) == expected[near]
        refused = ask(place.one, PROMPT, model=far)
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        assert str(place.redis.port) not in refused.text
    finally:
        place.redis.start()
    assert tokens_of(until_served(place.one, far)) == expected[far]


def test_engine_killed_while_it_converts_leaves_nothing_and_the_next_one_converts(place: Place) -> None:
    name, replies = "stores/killed", list[Reply]()
    folder = saved(place, name, seed=12, init_lora_weights="pissa")
    thread = threading.Thread(target=lambda: replies.append(register(place.one, name, folder)))
    place.one.wait_until_ready(PATIENCE)
    old = engine_of(place.one.pid)
    os.kill(old, signal.SIGSTOP)  # so that it cannot have answered
    thread.start()
    scratch = place.site.root / "near-one" / "tmp"
    eventually(lambda: any(scratch.glob("*/adapter_model.safetensors")), "the registration has not begun")
    os.kill(old, signal.SIGKILL)
    thread.join(PATIENCE)
    assert [reply.status for reply in replies] == [503]
    assert "Retry-After" in replies[0].headers
    until_replaced(place.one, old)
    eventually(lambda: not any(scratch.glob("*/adapter_model.safetensors")), "files of it were left over")
    assert call(f"{place.one.url}/admin/adapters/{name}", headers=ADMIN).status == 404
    assert register(place.one, name, folder).status == 201
    check(load_alone(place.site.model, folder), "default", PROMPT, ask(place.one, PROMPT, model=name))
