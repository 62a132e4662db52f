"""`on_cold` on the wire: what the engine is asked, and that headers and body name who answered."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.request import OnCold
from tests.mock_engine import MockReply
from tests.server.conftest import BASE

COMPLETION = {"model": "acme/bot", "prompt": "Hello", "max_tokens": 2}
CHAT = {"model": "acme/bot", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
FORMS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_base_that_answers_is_named_in_headers_and_body(
    http: aiohttp.ClientSession, house: Any, path: str, body: dict[str, Any]
) -> None:
    await house.register("acme/bot")
    house.engine.script = lambda request: MockReply(fell_back=True)
    async with http.post(path, json={**body, "on_cold": "base"}) as answer:
        assert (await answer.json())["model"] == BASE
        assert answer.headers["X-Adapter-Id"] == BASE
        assert answer.headers["X-Adapter-Version"] == "0"
        assert answer.headers["X-Adapter-Digest"] == "base"
        assert answer.headers["X-Adapter-Fallback"] == "base"
    (request,) = house.engine.requests
    assert (request.on_cold, request.fallback, request.cold_timeout) == (OnCold.BASE, (), 0.0)


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_version_before_that_answers_is_named_in_headers_and_body(
    http: aiohttp.ClientSession, house: Any, path: str, body: dict[str, Any]
) -> None:
    first = await house.register("acme/bot", seed=1)
    second = await house.register("acme/bot", seed=2)
    house.engine.script = lambda request: MockReply(fell_back=True)
    async with http.post(path, json={**body, "on_cold": "previous", "max_cold_wait_ms": 20}) as answer:
        assert (await answer.json())["model"] == "acme/bot"
        assert answer.headers["X-Adapter-Version"] == "1"
        assert answer.headers["X-Adapter-Digest"] == first.digest
        assert answer.headers["X-Adapter-Fallback"] == "previous"
    (request,) = house.engine.requests
    assert [use.ref for use in request.adapters] == [second]
    assert [use.ref for use in request.fallback] == [first]
    assert request.cold_timeout == 0.02


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_every_chunk_of_a_stream_names_who_answers(
    openai: AsyncOpenAI, house: Any, path: str, body: dict[str, Any]
) -> None:
    await house.register("acme/bot")
    house.engine.script = lambda request: MockReply(fell_back=True)
    api = openai.completions if path == "/v1/completions" else openai.chat.completions
    raw = await api.with_raw_response.create(**body, n=2, stream=True, extra_body={"on_cold": "base"})
    assert raw.headers["X-Adapter-Fallback"] == "base"
    chunks = [chunk async for chunk in raw.parse()]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    assert {chunk.model for chunk in chunks} == {BASE}


async def test_adapter_that_is_here_answers_itself_and_nothing_speaks_of_a_fallback(
    http: aiohttp.ClientSession, house: Any
) -> None:
    await house.register("acme/bot")
    async with http.post("/v1/completions", json={**COMPLETION, "on_cold": "base"}) as answer:
        assert (await answer.json())["model"] == answer.headers["X-Adapter-Id"] == "acme/bot"
        assert "X-Adapter-Fallback" not in answer.headers


async def test_choices_of_one_answer_are_one_answer_to_the_engine(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/bot")
    body = {**COMPLETION, "prompt": ["a", "b"], "n": 2, "on_cold": "base"}
    for _ in range(2):
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
    ids = [request.answer_id for request in house.engine.requests]
    assert len(set(ids[:4])) == len(set(ids[4:])) == 1
    assert ids[0] != ids[4]


async def test_choices_of_different_adapters_are_never_sent_as_one_answer(
    http: aiohttp.ClientSession, house: Any
) -> None:
    await house.register("acme/bot")
    house.engine.script = lambda request: MockReply(fell_back=request.request_id.endswith("-1"))
    for stream in (False, True):
        body = {**COMPLETION, "n": 2, "on_cold": "base", "stream": stream}
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 503
            assert "Retry-After" in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_adapter_that_is_cold_too_long_is_a_503_with_the_learned_retry_after(
    http: aiohttp.ClientSession, house: Any, stream: bool
) -> None:
    await house.register("acme/bot")
    house.engine.script = lambda request: MockReply(error=AdapterUnavailableError("still loading", retry_after=17.2))
    async with http.post("/v1/completions", json={**COMPLETION, "on_cold": "fail", "stream": stream}) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "18"
        assert (await answer.json())["error"]["code"] == "adapter_unavailable"
        assert "X-Adapter-Fallback" not in answer.headers


async def test_first_version_has_none_before_it(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/bot")
    async with http.post("/v1/completions", json={**COMPLETION, "on_cold": "previous"}) as answer:
        assert answer.status == 200
    (request,) = house.engine.requests
    assert (request.on_cold, request.fallback) == (OnCold.PREVIOUS, None)


@pytest.mark.parametrize("on_cold", ["wait", "fail"])
async def test_wait_and_fail_have_no_fallback(http: aiohttp.ClientSession, house: Any, on_cold: str) -> None:
    await house.register("acme/bot")
    async with http.post("/v1/completions", json={**COMPLETION, "on_cold": on_cold}) as answer:
        assert answer.status == 200
    (request,) = house.engine.requests
    assert request.fallback is None
    assert request.cold_timeout == (None if on_cold == "wait" else 0.0)


async def test_scale_of_the_adapter_is_the_scale_of_the_version_before(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/bot", seed=1)
    await house.register("acme/bot", seed=2)
    body = {"prompt": "x", "max_tokens": 1, "adapters": [{"id": "acme/bot", "scale": 0.5}], "on_cold": "previous"}
    house.engine.script = lambda request: MockReply(fell_back=True)
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.headers["X-Adapter-Scale"] == "0.5"
        assert answer.headers["X-Adapter-Version"] == "1"
    (request,) = house.engine.requests
    assert [use.scale for use in request.fallback] == [0.5]


SET = {"adapters": [{"id": "acme/bot"}, {"id": "acme/other"}]}
ACTIVATED = {"alora_invocation_tokens": [5, 6]}
REFUSALS = [
    ({**SET, "on_cold": "previous"}, "several"),
    ({"model": "acme/bot@2", "on_cold": "previous"}, "without a version"),
    ({"model": "acme/activated", "on_cold": "base"}, "invocation tokens differ"),
    ({"model": "acme/activated", "on_cold": "previous"}, "invocation tokens differ"),
    ({"adapters": [{"id": "acme/dora", "scale": 0.5}], "on_cold": "previous"}, "cannot be composed or scaled"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSALS)
async def test_fallback_that_could_not_answer_is_refused_in_words(
    http: aiohttp.ClientSession, house: Any, fields: dict[str, Any], words: str
) -> None:
    for seed in (1, 2):
        await house.register("acme/bot", seed)
    await house.register("acme/other", 3)
    await house.register("acme/activated", 4)
    await house.register("acme/activated", 5, ACTIVATED)
    await house.register("acme/dora", 6, {"use_dora": True})
    await house.register("acme/dora", 7)
    async with http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields}) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 400
        assert words in error["message"]
    assert not house.engine.requests


async def test_set_may_fall_back_to_the_base(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/bot", 1)
    await house.register("acme/other", 2)
    house.engine.script = lambda request: MockReply(fell_back=True)
    async with http.post("/v1/completions", json={"prompt": "x", **SET, "on_cold": "base"}) as answer:
        assert answer.headers["X-Adapter-Id"] == BASE
        assert "X-Adapter-Scale" not in answer.headers


async def test_base_model_itself_is_never_cold(http: aiohttp.ClientSession, house: Any) -> None:
    for on_cold in OnCold:
        async with http.post("/v1/completions", json={"prompt": "x", "on_cold": on_cold}) as answer:
            assert answer.status == 200
    assert all(request.fallback is None for request in house.engine.requests)
