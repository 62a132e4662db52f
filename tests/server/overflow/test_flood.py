"""A flood of three times what the engine computes, with a neighbour: engines of a fixed pace, real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.messages import Event
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.setting_groups.overflow import OverflowConfig
from tests.mock_engine import MockEngineClient, MockReply
from tests.server.conftest import House

STEP = 0.05  # seconds for a prompt, and for each token
NUM_TOKENS = 6
ROWS = 2
CAPACITY = ROWS / (STEP * (1 + NUM_TOKENS))  # requests per second

pytestmark = pytest.mark.nightly


def pace(engine: MockEngineClient, rows: int) -> None:
    """Let `rows` requests run at once; the others wait."""
    places, events = asyncio.Semaphore(rows), engine._events

    async def limited(request: InferenceRequest, reply: MockReply) -> AsyncIterator[Event]:
        async with places:
            async for event in events(request, reply):
                yield event

    engine.limits = BatchLimits(max_num_seqs=rows, max_num_batched_tokens=64)
    engine.script = lambda request: MockReply(delay=STEP)
    engine._events = limited  # type: ignore[method-assign]


@pytest.fixture
def overflow_config(overflow_config: OverflowConfig) -> OverflowConfig:
    return replace(overflow_config, overflow_after_ms=500 * STEP)


async def first_tokens(http: aiohttp.ClientSession, rate: float, seconds: float) -> list[float]:
    """Seconds to the first token of streams that come at a steady rate, in order of size."""

    async def ask(at: float) -> float:
        await asyncio.sleep(at)
        sent = time.monotonic()
        body = {"prompt": "x", "max_tokens": NUM_TOKENS, "stream": True}
        async with http.post("/v1/completions", json=body) as answered:
            assert answered.status == 200
            await answered.content.readany()
            first = time.monotonic() - sent
            assert b"[DONE]" in await answered.read()
        return first

    return sorted(await asyncio.gather(*(ask(number / rate) for number in range(int(rate * seconds)))))


async def test_first_token_in_a_flood_takes_at_most_twice_as_long_as_in_quiet(
    house: House, neighbour: House, http: aiohttp.ClientSession
) -> None:
    pace(house.engine, ROWS)
    pace(neighbour.engine, 16 * ROWS)
    await asyncio.sleep(1.2)  # the engine has said how many rows it runs
    quiet = await first_tokens(http, CAPACITY / 3, 4.0)
    assert neighbour.engine.requests == []
    flood = await first_tokens(http, 3 * CAPACITY, 6.0)
    shares: dict[str, Any] = {"here": len(house.engine.requests) - len(quiet), "there": len(neighbour.engine.requests)}
    print({"quiet": quiet[-1], "p50": flood[len(flood) // 2], "p95": flood[int(0.95 * len(flood))], **shares})
    assert flood[int(0.95 * len(flood))] <= 2 * quiet[int(0.95 * len(quiet))]
    assert shares["here"] > 0.2 * len(flood)
