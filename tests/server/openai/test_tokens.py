"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.mock_engine import MockReply
from tests.server.answer_schemas import EVENTS, faults_of

Ids = Callable[[str], tuple[int, ...]]
PATH = "/inference/v1/generate"


async def ask(http: aiohttp.ClientSession, status: int = 200, **body: Any) -> Any:
    async with http.post(PATH, json={"token_ids": [5, 6, 7], **body}) as answer:
        found = await answer.json()
        assert answer.status == status, found
        return found


async def test_tokens_go_in_and_tokens_come_out(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    end = house.services.spec.eos_token_ids[0]
    house.engine.script = lambda request: MockReply(token_ids=(*ids("Hello"), end))
    answer = await ask(http, sampling_params={"temperature": 0.5, "seed": 3, "max_tokens": 40, "detokenize": False})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*ids("Hello"), end], "the token that ended it is part of what a trainer needs"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    (request,) = house.engine.requests
    assert request.prompt_token_ids == (5, 6, 7)
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.5, 3, 40)


async def test_without_max_tokens_the_context_is_filled(http: aiohttp.ClientSession, house: Any) -> None:
    await ask(http)
    assert house.engine.requests[0].sampling.max_tokens == 128 - 3


async def test_logprobs_are_vllms(http: aiohttp.ClientSession) -> None:
    answer = await ask(http, sampling_params={"max_tokens": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{number}" for number in choice["token_ids"]]
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)
    assert answer["prompt_logprobs"][0] is None
    assert [str(number) in entry for number, entry in zip([6, 7], answer["prompt_logprobs"][1:], strict=True)] == [
        True
    ] * 2


async def test_streamed_tokens_add_up(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids("Hello wörld 😀"))
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 50, "logprobs": 0}, "stream": True}
    async with http.post(PATH, json={**body, "stream_options": {"include_usage": True}}) as answer:
        lines = [line for line in (await answer.text()).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [fault for event in events for fault in faults_of("POST", PATH, EVENTS, event)] == []
    choices = [choice for event in events for choice in event["choices"]]
    assert [number for choice in choices for number in choice["token_ids"]] == list(ids("Hello wörld 😀"))
    assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for choice in choices)
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == len(ids("Hello wörld 😀"))


async def test_adapter_answers_and_rules_hold(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/support")
    rules = {
        "allowed_token_ids": [3, 4],
        "bad_words": ["x"],
        "stop_token_ids": [9],
        "structured_outputs": {"regex": "a+"},
    }
    await ask(http, model="acme/support", sampling_params={**rules, "max_tokens": 2}, cache_salt="s")
    (request,) = house.engine.requests
    assert [use.ref.name for use in request.adapters] == ["acme/support"]
    assert (request.sampling.allowed_token_ids, request.sampling.stop_token_ids) == ((3, 4), (9,))
    assert request.grammar is not None
    assert request.cache_scope.endswith("s")


REFUSED: dict[str, dict[str, Any]] = {
    "token_ids": {"token_ids": "text"},
    "token_ids ": {"token_ids": []},
    "token_ids  ": {"token_ids": [[1], [2]]},
    "token_ids   ": {"token_ids": [10**6]},
    "sampling_params": {"sampling_params": 5},
    "temperature": {"sampling_params": {"temperature": 9}},
    "use_beam_search": {"sampling_params": {"use_beam_search": True}},
    "prompt_logprobs": {"sampling_params": {"prompt_logprobs": 99}},
    "features": {"features": {"mm_hashes": {}}},
    "max_tokens": {"sampling_params": {"max_tokens": 500}},
    "max_tokens ": {"sampling_params": {"max_tokens": 0}},
}


@pytest.mark.many(5)
@pytest.mark.parametrize("field", REFUSED)
async def test_wrong_field_is_refused(http: aiohttp.ClientSession, field: str) -> None:
    error = (await ask(http, 400, **REFUSED[field]))["error"]
    assert error["param"] == field.strip()
