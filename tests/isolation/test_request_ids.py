"""Point 8: requests are told apart by ids that the server makes; what clients call theirs is never a key."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.mock_engine import MockReply

THEIRS = "the-same-id-for-everybody"
HEADERS = {"X-Request-Id": THEIRS, "X-Correlation-Id": THEIRS, "Idempotency-Key": THEIRS}
BODY = {"prompt": [1, 2, 3], "max_tokens": 3, "request_id": THEIRS, "id": THEIRS, "user": THEIRS}


async def wait_for(house: Any, num_rows: int) -> None:
    async with asyncio.timeout(60):
        while len(house.engine._rows) != num_rows:
            await asyncio.sleep(0.005)


async def test_ids_of_clients_are_no_keys_though_the_header_is_given_back(
    http: aiohttp.ClientSession, house: Any
) -> None:
    answers = []
    for _ in range(3):
        async with http.post("/v1/completions", json=BODY, headers=HEADERS) as answer:
            assert answer.status == 200
            assert answer.headers["X-Request-Id"] == THEIRS
            answers.append((await answer.json())["id"])
    ids = [request.request_id for request in house.engine.requests] + answers
    assert len({name for name in ids if THEIRS in name}) == 0
    assert len({request.request_id for request in house.engine.requests}) == 3


async def test_client_that_leaves_ends_its_own_request_among_those_of_the_same_name(
    http: aiohttp.ClientSession, house: Any
) -> None:
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    first = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=HEADERS))
    await wait_for(house, 1)
    second = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=HEADERS))
    await wait_for(house, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await wait_for(house, 1)
    gate.set()
    async with await second as answer:
        assert answer.status == 200
        assert (await answer.json())["usage"]["completion_tokens"] == 3
