"""A fleet is watched as a whole, and no replica that does not answer holds up the view of the others."""

from __future__ import annotations

import asyncio
import time

import pytest

from lora_serve.client.ray.client import RayEngineClient
from lora_serve.core.errors import NotReadyError
from lora_serve.core.live import EngineView
from tests.client.ray.fake_fleet import fleet_client
from tests.engine.world import adapter
from tests.engine_host.engine_clients import request


async def all_of(client: RayEngineClient, seen: dict[str, int] | None = None) -> dict[str, EngineView]:
    return {look.replica: look for look in await client.watch(seen or {})}


async def run(client: RayEngineClient, *names: str) -> None:
    async def one(name: str) -> None:
        async for _ in client.infer(request(name, adapter(name))):
            pass

    await asyncio.gather(*(one(name) for name in names))


async def attached(client: RayEngineClient, count: int) -> None:
    await client.start()
    async with asyncio.timeout(60):
        while len(client.links) < count:
            await asyncio.sleep(0.01)


async def test_everything_shown_names_its_replica() -> None:
    async with fleet_client("one", "two") as (_, client):
        await attached(client, 2)
        assert set(await all_of(client)) == {"one", "two"}
        names = [f"r{number}" for number in range(8)]
        await run(client, *names)
        looks = await all_of(client)
        ended = {request.id: request.replica for look in looks.values() for request in look.ended}
        assert set(ended) == set(names)
        assert set(ended.values()) == {"one", "two"}, "no router sends eight adapters to one"
        for replica, look in looks.items():
            shown = (*look.steps, *look.ended, *look.slots, *look.moves)
            assert {one.replica for one in shown} == {replica}
        seen = {replica: look.mark for replica, look in looks.items()}
        assert [look.steps for look in (await all_of(client, seen)).values()] == [(), ()]


async def test_a_replica_that_does_not_answer_holds_up_no_view() -> None:
    async with fleet_client("one", "two") as (fleet, client):
        await attached(client, 2)
        await all_of(client)
        fleet.replicas["two"].runs.clear()
        before = time.monotonic()
        assert set(await all_of(client)) == {"one"}
        assert time.monotonic() - before < 3
        assert set(await all_of(client)) == {"one"}, "it was asked, and is not asked again before it answers"
        fleet.replicas["two"].runs.set()
        async with asyncio.timeout(60):
            while "two" not in await all_of(client):
                pass


async def test_a_lost_replica_is_left_out() -> None:
    async with fleet_client("one", "two") as (fleet, client):
        await attached(client, 2)
        fleet.kill("two")
        fleet.unlist("two")
        assert "one" in await all_of(client)
        async with asyncio.timeout(60):
            while set(await all_of(client)) != {"one"}:
                await asyncio.sleep(0.01)


async def test_two_gateways_watch_one_replica() -> None:
    async with fleet_client("only") as (fleet, client):
        await attached(client, 1)
        other = RayEngineClient(fleet, client._fleet._limits, 10.0)
        await attached(other, 1)
        for one in (client, other):
            await all_of(one)
        await run(client, "r")
        for one in (client, other):
            assert [request.id for request in (await all_of(one))["only"].ended] == ["r"]
        await other.stop()


async def test_without_replicas_there_is_nothing_to_watch() -> None:
    async with fleet_client("only") as (fleet, client):
        await attached(client, 1)
        fleet.unlist("only")
        with pytest.raises(NotReadyError):
            await client.watch({})
