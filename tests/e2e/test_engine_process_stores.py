"""`--engine process` on a real Redis: the engine does not know where it is, and yet loads what is there only."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Pair
from tests.e2e.plain_http import Reply, call
from tests.e2e.processes import PATIENCE, engine_of, eventually, loads_torch, until_replaced
from tests.e2e.test_adapter_kinds import PROMPT, ask, check, register, tokens_of
from tests.oracle import load_alone, save_adapter

pytestmark = [
    pytest.mark.nightly,  # by day: tests/model/test_adapter_reader.py, tests/client/test_process.py
    pytest.mark.engines("process", alone="the engine's process is killed, and asks its server for files"),
]


def blob_of(pair: Pair, process: ServerProcess, name: str) -> Path:
    store = pair.stores[process is pair.other]
    digest = card(process, name)["digest"].removeprefix("sha256:")
    return store / "cache" / "blobs" / digest


def make_cold(pair: Pair, process: ServerProcess, name: str) -> Path:
    """Off the device and out of the engine's memory; the folder that is left on this machine."""
    assert call(f"{process.url}/admin/adapters/{name}/evict", {}, ADMIN).status == 200
    scratch = blob_of(pair, process, name).parents[1] / "tmp"
    eventually(lambda: not list(scratch.iterdir()), "a file is still being prepared")
    return blob_of(pair, process, name)


def remove_record(pair: Pair, process: ServerProcess, name: str) -> None:
    """What is on this machine of it: all at once, so that a file which is being prepared finds no folder."""
    blob = make_cold(pair, process, name)
    aside = blob.rename(blob.parents[1] / "taken away")
    shutil.rmtree(aside)


def card(process: ServerProcess, name: str) -> Any:
    return call(f"{process.url}/admin/adapters/{name}", headers=ADMIN).json


def saved(pair: Pair, name: str, seed: int = 7, **config: Any) -> Path:
    return save_adapter(pair.site.model, pair.site.root / "adapters" / name, seed=seed, **config)


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
    pair: Pair, init: str
) -> None:
    name = f"stores/{init}"
    folder = saved(pair, name, init_lora_weights=init)
    assert [register(pair.one, name, folder).status for _ in range(2)] == [201, 200]
    oracle = load_alone(pair.site.model, folder)
    check(oracle, "default", PROMPT, ask(pair.one, PROMPT, model=name))
    check(oracle, "default", PROMPT, until_served(pair.other, name))
    found = card(pair.other, name)
    assert (found["rank"], found["config"]["converted_from"]["init"]) == (8, init)
    assert register(pair.other, name, folder).status == 200  # known as converted before, by whichever server
    assert not loads_torch(pair.one.pid)


def test_adapter_that_is_far_only_is_fetched_for_the_engine(pair: Pair) -> None:
    name = "stores/far"
    folder = saved(pair, name, seed=8)
    assert register(pair.one, name, folder).status == 201
    oracle = load_alone(pair.site.model, folder)
    check(oracle, "default", PROMPT, until_served(pair.other, name))
    for process in (pair.one, pair.other):
        remove_record(pair, process, name)
        check(oracle, "default", PROMPT, ask(process, PROMPT, model=name))
        assert blob_of(pair, process, name).is_dir()


def test_near_copy_that_rots_is_mended_from_the_far_one(pair: Pair) -> None:
    name = "stores/rotten"
    folder = saved(pair, name, seed=9)
    assert register(pair.one, name, folder).status == 201
    expected = tokens_of(ask(pair.one, PROMPT, model=name))
    blob = make_cold(pair, pair.one, name)
    for prepared in blob.glob("prepared-*"):
        prepared.unlink()
    weights = blob / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    assert tokens_of(ask(pair.one, PROMPT, model=name)) == expected
    assert weights.read_bytes() != content


def test_engine_that_starts_again_while_redis_is_away_serves_what_is_near(pair: Pair) -> None:
    near, far = "stores/near", "stores/away"
    assert register(pair.one, near, saved(pair, near, seed=10)).status == 201
    assert register(pair.one, far, saved(pair, far, seed=11)).status == 201
    expected = {name: tokens_of(ask(pair.one, PROMPT, model=name)) for name in (near, far)}
    remove_record(pair, pair.one, far)
    pair.redis.kill()
    try:
        restarted(pair.one)
        assert tokens_of(ask(pair.one, PROMPT, model=near)) == expected[near]
        refused = ask(pair.one, PROMPT, model=far)
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        assert str(pair.redis.port) not in refused.text
    finally:
        pair.redis.start()
    assert tokens_of(until_served(pair.one, far)) == expected[far]
    folder = pair.site.root / "adapters" / near
    eventually(lambda: register(pair.one, near, folder).status in (200, 201), "the registry stays away")


def test_engine_killed_while_it_converts_leaves_nothing_and_the_next_one_converts(pair: Pair) -> None:
    name, replies = "stores/killed", list[Reply]()
    folder = saved(pair, name, seed=12, init_lora_weights="pissa")
    thread = threading.Thread(target=lambda: replies.append(register(pair.one, name, folder)))
    pair.one.wait_until_ready(PATIENCE)
    old = engine_of(pair.one.pid)
    os.kill(old, signal.SIGSTOP)  # so that it cannot have answered
    thread.start()
    scratch = pair.stores[0] / "tmp"
    eventually(lambda: any(scratch.glob("*/adapter_model.safetensors")), "the registration has not begun")
    os.kill(old, signal.SIGKILL)
    thread.join(PATIENCE)
    assert [reply.status for reply in replies] == [503]
    assert "Retry-After" in replies[0].headers
    until_replaced(pair.one, old)
    eventually(lambda: not any(scratch.glob("*/adapter_model.safetensors")), "files of it were left over")
    assert call(f"{pair.one.url}/admin/adapters/{name}", headers=ADMIN).status == 404
    assert register(pair.one, name, folder).status == 201
    check(load_alone(pair.site.model, folder), "default", PROMPT, ask(pair.one, PROMPT, model=name))
