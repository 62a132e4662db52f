"""Answers of a second server, to callers that notice nothing of it but a header."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.server.overflow.neighbour import HEADER
from tests.mock_engine import MockReply
from tests.server.conftest import House
from tests.server.overflow.conftest import KEY, Busy, outcomes, overflow_of

HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_empty_queue_keeps_everything_here(house: House, neighbour: House, openai: AsyncOpenAI) -> None:
    answered = await openai.completions.with_raw_response.create(model="tiny-base", prompt="x")
    assert "X-Served-By" not in answered.headers
    assert (len(house.engine.requests), len(neighbour.engine.requests)) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_neighbours_answer_is_the_one_that_this_server_would_give(
    house: House, neighbour: House, openai: AsyncOpenAI, http: aiohttp.ClientSession, stream: bool
) -> None:
    for one in (house, neighbour):
        await one.register("acme/support")
    asked = {"model": "acme/support", "messages": HI, "max_tokens": 9, "temperature": 0, "stream": stream}
    async with http.post("/v1/chat/completions", json=asked) as answered:
        here = await answered.text()
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    first = asyncio.create_task(openai.completions.create(model="tiny-base", prompt="first"))
    await asyncio.sleep(0.05)
    async with http.post("/v1/chat/completions", json=asked) as answered:
        there = await answered.text()
        assert answered.headers["X-Served-By"] == "near"
        assert answered.headers["X-Adapter-Id"] == "acme/support"
        request_id = answered.headers["X-Request-Id"]
    assert timeless(there) == timeless(here)
    (row,) = neighbour.engine.requests
    assert (row.prompt_token_ids, row.refs) == (
        house.engine.requests[0].prompt_token_ids,
        house.engine.requests[0].refs,
    )
    assert request_id in there
    gate.set()
    await first


def timeless(text: str) -> list[str]:
    """A body without ids and times."""
    words = text.replace("{", ",").split(",")
    return [word for word in words if not word.lstrip().startswith(('"id"', '"created"'))]


async def test_several_rows_and_all_apis_of_one_turn(busy: Busy, neighbour: House, http: aiohttp.ClientSession) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["a", "b"], "n": 2, "max_tokens": 3},
        "/v1/responses": {"model": "tiny-base", "input": "x", "max_output_tokens": 3},
        "/v1/messages": {"model": "tiny-base", "messages": HI, "max_tokens": 3},
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    }
    for path, body in bodies.items():
        async with http.post(path, json=body) as answered:
            assert answered.status == 200, await answered.text()
            assert answered.headers["X-Served-By"] == "near"
    assert (busy.num_here, len(neighbour.engine.requests)) == (0, 4 + 3)
    assert await outcomes(busy.house) == {"answered": 7}


async def test_stop_strings_and_stop_ids_end_the_text_as_here(
    busy: Busy, neighbour: House, openai: AsyncOpenAI, ids: Any
) -> None:
    neighbour.engine.script = lambda request: MockReply(token_ids=ids("one two three<|end|>"))
    for stream in (False, True):
        answered: Any = await openai.completions.create(
            model="tiny-base", prompt="x", max_tokens=50, stop=" tw", stream=stream
        )
        choices = [part.choices[0] async for part in answered] if stream else answered.choices
        assert "".join(choice.text for choice in choices) == "one"
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", " tw")
    whole = await openai.completions.create(model="tiny-base", prompt="x", max_tokens=50)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one two three", "stop")
    assert whole.choices[0].model_extra == {"stop_reason": None, "prompt_logprobs": None}
    assert busy.num_here == 0


async def test_usage_is_metered_for_the_callers_tenant(busy: Busy, openai: AsyncOpenAI) -> None:
    answered = await openai.completions.create(model="tiny-base", prompt="abc", max_tokens=5)
    assert answered.usage is not None
    assert answered.usage.completion_tokens == 5
    (((_, key, figures),), _) = await busy.house.services.meter.rows(0, 2**40)
    assert (key.tenant, key.adapter) == ("default", "tiny-base")
    assert (figures.requests, figures.prompt_tokens, figures.generated_tokens) == (1, answered.usage.prompt_tokens, 5)


async def test_requests_that_came_from_another_server_stay(
    busy: Busy, neighbour: House, http: aiohttp.ClientSession
) -> None:
    waiting = asyncio.create_task(post(http, {"prompt": "x"}, {HEADER: "1"}))
    while busy.num_here == 0:
        await asyncio.sleep(0.001)
    busy.end()
    assert (await waiting).status == 200
    assert neighbour.engine.requests == []


async def test_server_that_names_itself_is_found_out(
    busy: Busy, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    (itself,) = overflow_of(busy.house).neighbours
    itself.url = busy.house.url
    waiting = asyncio.create_task(post(http, {"prompt": "x"}))
    while busy.num_here == 0:
        await asyncio.sleep(0.001)
    assert itself.is_self
    assert "near is this server itself" in caplog.text
    busy.end()
    assert (await waiting).status == 200


async def post(
    http: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    async with http.post("/v1/completions", json=body, headers=headers) as answered:
        await answered.read()
        return answered


async def test_caller_who_leaves_frees_the_neighbour(busy: Busy, neighbour: House, http: aiohttp.ClientSession) -> None:
    gate = asyncio.Event()
    neighbour.engine.script = lambda request: MockReply(gate=gate)
    task = asyncio.create_task(post(http, {"prompt": "x", "stream": True}))
    async with asyncio.timeout(10):
        while not neighbour.engine.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not neighbour.engine.aborted:
            await asyncio.sleep(0.001)
    assert await outcomes(busy.house) == {"left": 1}
    assert busy.num_here == 0


async def test_key_is_shown_to_the_neighbour_and_nobody_else(
    busy: Busy, openai: AsyncOpenAI, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    await openai.completions.create(model="tiny-base", prompt="x")
    async with http.get("/metrics") as scraped:
        text = await scraped.text()
    assert 'lora_serve_overflow_requests_total{neighbour="near",outcome="answered"} 1.0' in text
    assert 'lora_serve_overflow_neighbour_up{neighbour="near"} 1.0' in text
    assert KEY not in text + caplog.text + repr(overflow_of(busy.house)._config)
