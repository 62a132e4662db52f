"""GET /admin/fleet, and what cards, /admin/engine and limits say of several engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve import __version__
from lora_serve.core.errors import EngineLostError
from lora_serve.core.stats import EngineStats, ReplicaState, ReplicaStats, merged
from tests.mock_engine import MockReply
from tests.server.conftest import ADMIN, BASE
from tests.server.fleets import REPLICAS, play_fleet


async def get(session: aiohttp.ClientSession, path: str, status: int = 200, **query: str) -> Any:
    async with session.get(path, params=query, headers=ADMIN) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_server_without_a_fleet_has_one_replica(http: aiohttp.ClientSession, house: Any) -> None:
    ref = await house.register("acme/one")
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    body = {"model": "acme/one", "prompt": "x", "max_tokens": 1}
    task = asyncio.create_task(http.post("/v1/completions", json=body, headers=ADMIN))
    async with asyncio.timeout(60):
        while not house.engine.requests:
            await asyncio.sleep(0.005)
    (card,) = (await get(http, "/admin/fleet"))["data"]
    gate.set()
    assert (await task).status == 200
    assert (card["id"], card["state"], card["reason"], card["version"]) == ("0", "ready", "", __version__)
    assert card["base_fingerprint"] == house.services.spec.fingerprint
    assert (card["num_requests"], card["num_waiting"], card["num_servers"]) == (1, 1, 1)
    assert 0 <= card["age_seconds"] < 60
    found = await get(http, "/admin/fleet", adapter="acme/one")
    place = {"replica": "0", "tiers": ["host", "device"], "is_loading": False, "is_pinned": False, "num_rows": 0}
    assert found["adapter"] == {
        "id": "acme/one", "versions": [{"version": 1, "digest": ref.digest, "places": [place]}],
    }  # fmt: skip
    assert (await get(http, "/admin/fleet"))["adapter"] is None


async def test_engine_that_was_lost_is_shown_as_such(
    http: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost() -> EngineStats:
        raise EngineLostError("gone", 1.0)

    monkeypatch.setattr(house.engine, "stats", lost)
    house.services.lifecycle.restarting()
    house.services.metrics.engine_restarts.inc()
    found = await get(http, "/admin/fleet")
    (card,) = found["data"]
    assert (card["state"], card["num_running"], card["slots"], found["restarts"]) == ("starting", 0, [], 1)
    assert "restarted" in card["reason"]
    house.services.lifecycle.fail("it is dead")
    (card,) = (await get(http, "/admin/fleet"))["data"]
    assert (card["state"], card["reason"]) == ("lost", "it is dead")


async def test_each_replica_shows_what_it_holds(http: aiohttp.ClientSession, house: Any) -> None:
    home = await play_fleet(house)
    found = await get(http, "/admin/fleet")
    assert [card["id"] for card in found["data"]] == list(REPLICAS)
    for card in found["data"]:
        names = {slot["name"] for slot in card["slots"] if slot["replica"] == card["id"]}
        assert names == ({"acme/one", "acme/all"} if card["id"] == home else {"acme/all"})


async def test_where_an_adapter_lives(http: aiohttp.ClientSession, house: Any) -> None:
    home = await play_fleet(house)

    async def places(adapter: str) -> list[tuple[str, bool]]:
        (version,) = (await get(http, "/admin/fleet", adapter=adapter))["adapter"]["versions"]
        return [(place["replica"], place["is_pinned"]) for place in version["places"]]

    assert await places("acme/one") == [(home, False)]
    assert await places("acme/all") == [(name, True) for name in REPLICAS]
    assert await places("acme/none") == []
    digest = house.services.catalog.entry("acme/one").default.digest
    assert await places(digest) == [(home, False)]
    for unknown in ("acme/nobody", "sha256:" + "0" * 64, ""):
        await get(http, "/admin/fleet", 404, adapter=unknown)


async def test_versions_of_an_adapter_live_in_different_places(http: aiohttp.ClientSession, house: Any) -> None:
    home = await play_fleet(house)
    await house.register("acme/one", seed=7)
    found = (await get(http, "/admin/fleet", adapter="acme/one"))["adapter"]["versions"]
    assert [(one["version"], [place["replica"] for place in one["places"]]) for one in found] == [(1, [home]), (2, [])]


async def test_card_names_the_replicas(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/before")
    assert (await get(http, "/admin/adapters/acme/before"))["replicas"] is None
    home = await play_fleet(house)
    card = await get(http, "/admin/adapters/acme/one")
    assert [place["replica"] for place in card["replicas"]] == [home]
    assert (card["state"], card["tiers"]) == ("on_device", ["disk", "host", "device"])
    assert len((await get(http, "/admin/adapters/acme/all"))["replicas"]) == len(REPLICAS)
    assert (await get(http, "/admin/adapters/acme/none"))["replicas"] == []


async def test_engine_shows_the_sums_and_the_limits_that_can_be_set(http: aiohttp.ClientSession, house: Any) -> None:
    """A limit that is read and written back must not have become another one."""
    await play_fleet(house)
    found = await get(http, "/admin/engine")
    assert found["max_loras"] == house.engine.max_loras
    assert (await house.engine.stats()).max_loras == len(REPLICAS) * house.engine.max_loras
    assert found["num_blocks"] == 300
    assert found["batcher"]["max_num_seqs"] == house.engine.limits.max_num_seqs
    assert sorted(slot["replica"] for slot in found["slots"] if slot["pinned"]) == list(REPLICAS)
    assert sorted(found["running_adapters"]) == ["acme/all", "acme/one"]
    async with http.put("/admin/engine", json={"max_loras": found["max_loras"]}, headers=ADMIN) as answer:
        assert (await answer.json())["max_loras"] == found["max_loras"]


async def test_replicas_are_listed_in_short(http: aiohttp.ClientSession, house: Any) -> None:
    (alone,) = (found := await get(http, "/admin/fleet"))["replicas"]
    assert alone == {
        "id": "0", "node": "localhost", "state": "ready", "resident": [], "num_running": 0, "num_waiting": 0,
        "restarts": 0,
    }  # fmt: skip
    assert found["router"] is None
    house.services.metrics.engine_restarts.inc()
    assert [one["restarts"] for one in (await get(http, "/admin/fleet"))["replicas"]] == [1]
    await play_fleet(house)
    found = await get(http, "/admin/fleet")
    assert found["router"] == {"name": "affinity"}
    for one, card in zip(found["replicas"], found["data"], strict=True):
        assert one["resident"] == [slot["digest"] for slot in card["slots"]] != []
        assert {name: one[name] for name in one.keys() & card.keys()}.items() <= card.items()
        assert one["restarts"] == 0  # one that is restarted is another one, with another id


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_says_which_replica_computed_it(http: aiohttp.ClientSession, house: Any, stream: bool) -> None:
    body = {"model": BASE, "prompt": "x", "max_tokens": 1, "stream": stream}
    async with http.post("/v1/completions", json=body, headers=ADMIN) as answer:
        assert answer.status == 200
        assert "X-Replica-Id" not in answer.headers
    home = await play_fleet(house)
    async with http.post("/v1/completions", json={**body, "model": "acme/one"}, headers=ADMIN) as answer:
        assert (answer.status, answer.headers["X-Replica-Id"]) == (200, home)
    async with http.post("/v1/completions", json={**body, "model": "acme/nobody"}, headers=ADMIN) as answer:
        assert "X-Replica-Id" not in answer.headers


async def test_refused_and_silent_replicas_are_listed(
    http: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ReplicaStats("a", "10.0.0.1", ReplicaState.READY, stats=await house.engine.stats())
    other = replace(ready, replica="b", state=ReplicaState.REFUSED, reason="another base model", stats=None)

    async def stats() -> EngineStats:
        return merged([ready, other], num_lost=3)

    monkeypatch.setattr(house.engine, "stats", stats)
    found = await get(http, "/admin/fleet")
    assert [(card["id"], card["state"], card["reason"]) for card in found["data"]] == [
        ("a", "ready", ""), ("b", "refused", "another base model"),
    ]  # fmt: skip
    assert found["restarts"] == 3


async def test_fleet_without_a_replica_is_empty(
    http: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stats() -> EngineStats:
        return merged([])

    monkeypatch.setattr(house.engine, "stats", stats)
    assert (await get(http, "/admin/fleet"))["data"] == []
    assert (await get(http, "/admin/engine"))["max_loras"] == 0
