"""Large bodies that are under way take a limited memory together; what does not fit is told to come again."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from lora_serve.core.errors import CapacityError
from lora_serve.server.json_body import MAX_SMALL
from lora_serve.server.large_bodies import LargeBodies
from lora_serve.server.services import Services

PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}
ASKED = b'{"prompt": "x", "max_tokens": 1}'
LARGE = b'{"junk": "' + b"," * 90_000 + b'", ' + ASKED[1:]  # two of them fit; for so many commas a process parses it
MAX_BYTES = 250_000


@pytest.fixture
async def services(services: Services) -> AsyncIterator[Services]:
    bodies = LargeBodies(MAX_BYTES, MAX_BYTES)
    yield replace(services, large_bodies=bodies)
    bodies.close()


async def status(http: aiohttp.ClientSession, body: bytes) -> int:
    async with http.post(PATH, data=body, headers=JSON) as answer:
        return answer.status


async def until_held(services: Services, is_enough: Callable[[int], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_enough(services.large_bodies.num_bytes):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def held_back(
    http: aiohttp.ClientSession, services: Services, body: bytes, coding: str = "identity"
) -> AsyncIterator[Callable[[], None]]:
    """Two requests whose bodies have come, but for the last 8 bytes, which are sent once the function is called."""
    headers = JSON | {"Content-Encoding": coding}
    rest = asyncio.Event()

    async def content() -> AsyncIterator[bytes]:
        yield body[:-8]
        await rest.wait()
        yield body[-8:]

    async def send() -> int:
        async with http.post(PATH, data=content(), headers=headers) as answer:
            return answer.status

    tasks = [asyncio.create_task(send()) for _ in range(2)]
    await until_held(services, lambda held: held >= 2 * (len(LARGE) - 8))
    yield rest.set
    if rest.is_set():
        assert await asyncio.gather(*tasks) == [200, 200]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("coding", ["gzip", "identity"])
async def test_large_body_is_503_while_others_fill_the_memory(
    http: aiohttp.ClientSession, services: Services, coding: str
) -> None:
    """What counts of a coded body is what it decodes to."""
    body = gzip.compress(LARGE) if coding == "gzip" else LARGE
    async with held_back(http, services, body, coding) as finish:
        async with http.post(PATH, data=LARGE, headers=JSON) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("server_error", "overloaded")
        assert "large request bodies" in error["message"]
        finish()
    assert await status(http, LARGE) == 200


async def test_small_body_is_served_while_large_ones_fill_the_memory(
    http: aiohttp.ClientSession, services: Services
) -> None:
    async with held_back(http, services, LARGE):
        assert await status(http, ASKED.rjust(MAX_SMALL)) == 200
        assert await status(http, ASKED.rjust(MAX_SMALL + 10_000)) == 503


async def test_body_that_waits_to_be_parsed_keeps_its_room(http: aiohttp.ClientSession, services: Services) -> None:
    bodies, both = services.large_bodies, threading.Barrier(3)
    for _ in range(2):
        bodies._threads.submit(both.wait)
    try:
        waiting = asyncio.create_task(status(http, LARGE))
        await until_held(services, lambda held: held == len(LARGE))
        await asyncio.sleep(0.05)
        assert bodies.num_bytes == len(LARGE)
    finally:
        both.wait()
    assert await waiting == 200
    assert bodies.num_bytes == 0


async def test_bodies_whose_clients_left_leave_their_room(http: aiohttp.ClientSession, services: Services) -> None:
    async with held_back(http, services, LARGE):
        pass
    await until_held(services, lambda held: held == 0)
    assert await status(http, LARGE) == 200


def test_tenant_leaves_room_for_others() -> None:
    bodies = LargeBodies(max_bytes=1_000_000, max_of_tenant=600_000)
    with bodies.memory_for("acme") as first, bodies.memory_for("acme") as second, bodies.memory_for("other") as third:
        first(500_000)
        second(100_000)
        with pytest.raises(CapacityError):
            second(100_001)
        third(400_000)
        with pytest.raises(CapacityError):
            third(400_001)
    with bodies.memory_for("acme") as again, bodies.memory_for("acme") as beside:
        again(600_000)
        with pytest.raises(CapacityError):
            beside(100_000)


def test_body_by_itself_always_has_room() -> None:
    bodies = LargeBodies(max_bytes=100_000, max_of_tenant=100_000)
    with bodies.memory_for("acme") as grow:
        grow(90_000)
        grow(10**9)
    assert bodies.num_bytes == 0
