"""--wait: shipped everywhere, or exit 1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.commands.conftest import Adapters
from tests.commands.stub_server import StubServer, refusal


@pytest.fixture
async def replica() -> AsyncIterator[StubServer]:
    async with StubServer() as server:
        yield server


def urls(*servers: StubServer) -> list[str]:
    return [part for server in servers for part in ("--url", server.url)]


async def seen(replica: StubServer, gets: int) -> None:
    async with asyncio.timeout(10):
        while replica.gets < gets:
            await asyncio.sleep(0.005)


async def test_it_ends_well_once_the_last_replica_shows_the_route(
    adapters: Adapters, stub: StubServer, replica: StubServer
) -> None:
    command = asyncio.create_task(adapters("route", "acme/support", "3", "--wait", *urls(stub, replica)))
    await seen(replica, 3)
    assert not command.done()
    replica.set_route("acme/support", 3)
    ended = await command
    assert (ended.code, ended.out) == (0, "acme/support means version 3\n")


async def test_a_canary_is_waited_for_as_well(adapters: Adapters, stub: StubServer, replica: StubServer) -> None:
    flags = ("--canary", "4=10", "--wait", *urls(stub, replica))
    command = asyncio.create_task(adapters("route", "acme/support", "3", *flags))
    replica.set_route("acme/support", 3)
    await seen(replica, 3)
    assert not command.done()
    replica.set_route("acme/support", 3, {"version": 4, "percent": 10})
    assert (await command).code == 0


async def test_a_replica_that_stays_behind_is_named(adapters: Adapters, stub: StubServer, replica: StubServer) -> None:
    ended = await adapters("route", "acme/support", "3", "--wait", "--timeout", "1", *urls(stub, replica))
    assert (ended.code, ended.out) == (1, "")
    first, *lines = ended.err.splitlines()
    assert first.startswith(f"lora-serve: error: {stub.url} took the change, but")
    assert lines == [f"{stub.url}: done", f"{replica.url}: it serves version 1 instead of version 3"]


async def test_a_replica_that_lacks_the_content_or_the_adapter_is_named(
    adapters: Adapters, stub: StubServer, replica: StubServer
) -> None:
    replica.cards["acme/support"]["versions"].pop()
    flags = ("--wait", "--timeout", "1", *urls(stub, replica))
    ended = await adapters("route", "acme/support", "1", *flags)
    assert ended.err.endswith(f"{replica.url}: it has no version 4 of this content\n")
    replica.cards.clear()
    ended = await adapters("route", "acme/support", "1", *flags)
    assert ended.err.endswith(f"{replica.url}: it does not know the adapter\n")


async def test_a_replica_that_is_away_may_come_back_until_the_time_is_up(
    adapters: Adapters, stub: StubServer, replica: StubServer
) -> None:
    replica.set_route("acme/support", 3)
    replica.replies += [refusal(503, "draining", Retry_After="1"), web.Response(status=200, text="not JSON")]
    assert (await adapters("route", "acme/support", "3", "--wait", *urls(stub, replica))).code == 0
    assert replica.replies == []
    nobody = ("--url", "http://127.0.0.1:1")
    ended = await adapters("route", "acme/support", "3", "--wait", "--timeout", "1", *urls(stub), *nobody)
    assert ended.code == 1
    assert "cannot connect to http://127.0.0.1:1" in ended.err


async def test_a_wrong_key_for_a_replica_is_not_waited_out(
    adapters: Adapters, stub: StubServer, replica: StubServer
) -> None:
    replica.replies += [refusal(401, "No.")]
    ended = await adapters("route", "acme/support", "3", "--wait", *urls(stub, replica))
    assert ended.code == 1
    assert f"\n{replica.url}: No. give" in ended.err


async def test_an_upload_waits_for_the_content_not_for_the_number(
    adapters: Adapters, stub: StubServer, replica: StubServer, make_adapter: object
) -> None:
    folder = make_adapter("a", 1)  # type: ignore[operator]
    replica.cards["acme/new"] = stub.cards["acme/support"] | {"digest": "sha256:other", "versions": []}
    flags = ("--wait", "--timeout", "1", *urls(stub, replica))
    ended = await adapters("upload", "acme/new", str(folder), *flags)
    assert ended.code == 1
    stub.cards["acme/new"] = replica.cards["acme/new"] = stub.cards["acme/support"]
    assert (await adapters("upload", "acme/new", str(folder), *flags)).code == 0


async def test_without_wait_only_the_first_server_is_asked(
    adapters: Adapters, stub: StubServer, replica: StubServer
) -> None:
    assert (await adapters("route", "acme/support", "3", *urls(stub, replica))).code == 0
    assert replica.gets == 0
