"""An engine is lost while it answers: the answer begins again if nothing of it was sent, and what was lost is free."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import EngineLostError, InternalError
from lora_serve.core.request import InferenceRequest
from lora_serve.core.tenant import Quota
from tests.mock_engine import MockReply
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.accounting.test_usage_api import usage
from tests.server.conftest import BASE, House

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    "chat with its prompt": ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}),
    "completion": ("/v1/completions", {"model": BASE, "prompt": [[1, 2], [3]], "n": 2, "echo": True, "logprobs": 1}),
    "best of": ("/v1/completions", {"model": BASE, "prompt": "x", "n": 1, "best_of": 3, "max_tokens": 9}),
    "tokens": ("/inference/v1/generate", {"model": BASE, "token_ids": [5, 6], "sampling_params": {"max_tokens": 9}}),
    "response": ("/v1/responses", {"model": BASE, "input": "Hi", "max_output_tokens": 20}),
    "message": ("/v1/messages", {"model": BASE, "messages": CHAT["messages"], "max_tokens": 20}),
}
CHANGING = ("id", "request_id", "created", "created_at")
COUNTED = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens", "queue_seconds", "load_seconds")


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(part) for name, part in value.items() if name not in CHANGING}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


def losing(*lost_after: int, **more: Any) -> Callable[[InferenceRequest], MockReply]:
    """The first choice is lost so often; the others are not."""
    first: list[str] = []

    def script(request: InferenceRequest) -> MockReply:
        first.append(request.request_id)
        return MockReply(lost_after=lost_after if request.request_id == first[0] else (), **more)

    return script


@pytest.mark.parametrize("asked", ASKED)
async def test_answer_that_was_lost_unseen_is_given_whole_and_costs_what_it_says(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, asked: str
) -> None:
    answers: list[Any] = []
    path, body = ASKED[asked]
    for tenant, script in (("one", losing()), ("two", losing(3, 1))):
        house.engine.script = script
        async with http.post(path, json=body, headers=bearer(new_key(tenant))) as response:
            answers.append(without_ids(await response.json()))
            assert response.status == 200, answers
    assert answers[0] == answers[1]
    one, two = await usage(admin, by="tenant")
    assert {name: one[name] for name in COUNTED} == pytest.approx({name: two[name] for name in COUNTED})


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_of_which_something_was_shown_ends_with_an_error_and_costs_that(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, n: int
) -> None:
    house.engine.script = lambda request: MockReply(lost_after=(3,), delay=0.02)  # all prompts come before any token
    body = {"model": BASE, "prompt": [1, 2, 3, 4], "max_tokens": 9, "n": n, "stream": True, "return_token_ids": True}
    async with http.post("/v1/completions", json=body, headers=bearer(new_key("acme"))) as response:
        *chunks, error, done = (await response.text()).strip().split("\n\n")
    assert (response.status, done) == (200, "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_restarted"
    shown = [json.loads(chunk.removeprefix("data: "))["choices"][0]["token_ids"] for chunk in chunks]
    (row,) = await usage(admin, by="tenant")
    assert house.engine.begun_again == []
    assert sum(map(len, shown)) == row["generated_tokens"] in range(3, 3 * n + 1)


async def test_stream_that_was_lost_before_anything_was_shown_begins_again(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    """Nothing is written before the prompts of all choices are computed."""
    found: list[Any] = []
    for lost_after in ((), (5,)):
        status, text = await streamed_by_two(house, http, new_key("acme"), MockReply(lost_after=lost_after))
        assert status == 200
        chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in text.strip().split("\n\n")[:-1]]
        found.append(without_ids(chunks))
    assert found[0] == found[1]
    (row,) = await usage(admin, by="tenant")
    assert row["generated_tokens"] == 2 * 2 * 9


async def test_stream_that_began_again_still_waits_for_the_prompts_of_its_other_choices(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    error = InternalError("broken")
    status, _ = await streamed_by_two(house, http, new_key("acme"), MockReply(lost_after=(5,)), error=error)
    assert status == 500


async def streamed_by_two(
    house: House, http: aiohttp.ClientSession, secret: str, first: MockReply, **second: Any
) -> tuple[int, str]:
    """A stream of two choices. The prompt of the second is computed, or not, when the first has ended."""
    body = {"model": BASE, "prompt": [1, 2], "n": 2, "max_tokens": 9, "logprobs": 1, "stream": True}
    first_ended, known = asyncio.Event(), len(house.engine.requests)
    replies = iter((first, MockReply(gate=first_ended, **second)))
    house.engine.script = lambda request: next(replies)

    async def asked() -> tuple[int, str]:
        async with http.post("/v1/completions", json=body, headers=bearer(secret)) as response:
            return response.status, await response.text()

    task = asyncio.create_task(asked())
    while len(house.engine.requests) < known + 2 or len(house.engine._rows) == 2:
        await asyncio.sleep(0.001)
    first_ended.set()
    return await task


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_lost_for_good_before_anything_was_shown_costs_nothing(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, n: int, stream: bool
) -> None:
    secret = new_key("acme", Quota(tokens_per_minute=100))
    error, lost_after = EngineLostError("The engine stopped unexpectedly; try again.", 1.0), () if stream else (2, 2)
    error_after = None if stream else 2
    house.engine.script = lambda request: MockReply(error=error, error_after=error_after, lost_after=lost_after)
    response = await complete(http, secret, max_tokens=20, n=n, stream=stream)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert await usage(admin) == []
    house.engine.script = lambda request: MockReply()
    response = await complete(http, secret)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(100 - 4 - 2)
