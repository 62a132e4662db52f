"""Server-sent events: order, equality with the whole answer, errors, disconnects, slow readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, InternalServerError

from lora_serve.core.errors import AdapterUnavailableError, NumericalError, QueueFullError
from tests.mock_engine import MockReply

Ids = Callable[[str], tuple[int, ...]]
BASE = "tiny-base"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SENTENCE = "The quick brown fox 😀 jumps over 你好 the lazy dog."


def says(ids: Ids, text: str, **reply: Any) -> Callable[[Any], MockReply]:
    return lambda request: MockReply(token_ids=ids(text), **reply)


async def events_of(answer: aiohttp.ClientResponse) -> list[Any]:
    """The JSON of each event; [DONE] stays a string."""
    text = (await answer.read()).decode()
    assert text.endswith("\n\n")
    lines = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with session.post("/v1/completions", json=body) as answer:
        return await answer.read()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_chat_stream_has_role_then_text_then_end(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, SENTENCE + "<|end|>")
    stream = await openai.chat.completions.create(model=BASE, messages=HI, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SENTENCE
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_completion_stream_is_the_whole_answer_in_pieces(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, SENTENCE)
    stream = await openai.completions.create(model=BASE, prompt="x", max_tokens=90, stream=True, logprobs=1, echo=True)
    chunks = [chunk async for chunk in stream]
    whole = await openai.completions.create(model=BASE, prompt="x", max_tokens=90, logprobs=1, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks if chunk.choices[0].logprobs]
        assert list(chain.from_iterable(parts)) == getattr(whole.choices[0].logprobs, name)


async def test_every_choice_is_told_apart(openai: AsyncOpenAI) -> None:
    whole = await openai.chat.completions.create(model=BASE, messages=HI, n=3, seed=1, max_tokens=8)
    stream = await openai.chat.completions.create(model=BASE, messages=HI, n=3, seed=1, max_tokens=8, stream=True)
    texts, ends = ["", "", ""], [0, 0, 0]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends[chunk.choices[0].index] += chunk.choices[0].finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [1, 1, 1]


async def test_stop_string_never_shows_in_a_stream(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "abc STOnot STOP def")
    stream = await openai.completions.create(model=BASE, prompt="x", max_tokens=90, stop="STOP", stream=True)
    so_far = ""
    async for chunk in stream:
        so_far += chunk.choices[0].text
        assert "abc STOnot ".startswith(so_far)
    assert so_far == "abc STOnot "
    await until(lambda: len(house.engine.aborted) == 1)


async def test_usage_comes_last_and_only_if_asked_for(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The fox")
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as answer:
        events = await events_of(answer)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(ids("The fox"))
    assert all(event["usage"] is None for event in events[:-2])


async def test_usage_may_come_with_every_chunk(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The fox")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options}
    async with http.post("/v1/completions", json=body) as answer:
        events = await events_of(answer)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [*range(1, len(ids("The fox")) + 1), len(ids("The fox")), len(ids("The fox"))]


@pytest.mark.parametrize(
    ("options", "last", "each"),
    [
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True}, True, True),
        ({"include_usage": None}, False, False),
        ({}, False, False),
    ],
)
async def test_usage_comes_only_where_it_is_asked_for(
    http: aiohttp.ClientSession, options: dict[str, Any], last: bool, each: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True, "stream_options": options}
    async with http.post("/v1/completions", json=body) as answer:
        *events, done = await events_of(answer)
    assert done == "[DONE]"
    assert (events[-1]["choices"] == []) is last
    assert all(("usage" in event) is each for event in events)


async def test_headers_of_a_stream_name_who_answers(http: aiohttp.ClientSession, house: Any) -> None:
    ref = await house.register("acme/support")
    async with http.post("/v1/completions", json={"model": "acme/support", "prompt": "x", "stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["X-Adapter-Digest"] == ref.digest
        assert answer.headers["X-Request-Id"]
        assert answer.headers["Server-Timing"] == "queue;dur=1.00, load;dur=2.00, prefill;dur=3.00"
        await answer.read()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("The queue is full.", retry_after=3.2), 503, "overloaded"),
        (AdapterUnavailableError("The adapter's bytes are lost.", retry_after=1000), 503, "adapter_unavailable"),
        (NumericalError("not finite"), 500, "internal_error"),
    ],
)
async def test_error_before_the_first_token_is_plain_http(
    http: aiohttp.ClientSession, house: Any, error: Any, status: int, code: str
) -> None:
    house.engine.script = lambda request: MockReply(error=error)
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == code
        if status == 503:
            assert answer.headers["Retry-After"] in ("4", "120")


async def test_error_of_one_choice_before_all_are_admitted_is_plain_http(
    http: aiohttp.ClientSession, house: Any, ids: Ids
) -> None:
    """The first choice has tokens already; none of them may have been sent."""

    def script(request: Any) -> MockReply:
        if request.request_id.endswith("-1"):
            return MockReply(error=QueueFullError("full"), delay=0.05)
        return MockReply(token_ids=ids("abc"))

    house.engine.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "n": 2, "stream": True}) as answer:
        assert answer.status == 503
    await until(lambda: not house.engine._rows)


async def test_tokens_that_come_before_the_last_choice_is_admitted_are_sent_in_their_order(
    openai: AsyncOpenAI, house: Any, ids: Ids
) -> None:
    def script(request: Any) -> MockReply:
        return MockReply(token_ids=ids(SENTENCE), delay=0.05 if request.request_id.endswith("-1") else 0.0)

    house.engine.script = script
    stream = await openai.chat.completions.create(model=BASE, messages=HI, n=2, max_tokens=90, stream=True)
    texts, choices = ["", ""], []
    async for chunk in stream:
        choices.append(chunk.choices[0].index)
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert choices.index(1) > 2, "the second choice came too soon for this test"
    assert texts == [SENTENCE, SENTENCE]


async def test_later_error_is_an_event_and_the_stream_ends(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "abcdef", error=NumericalError("secret detail"), error_after=3)
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.status == 200
        events = await events_of(answer)
    assert "".join(event["choices"][0]["text"] for event in events[:-2]) == "abc"
    assert events[-2]["error"]["code"] == "internal_error"
    assert answer.headers["X-Request-Id"] in events[-2]["error"]["message"]
    assert "secret" not in str(events)


async def test_openai_client_raises_a_later_error(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "abcdef", error=NumericalError("x"), error_after=3)
    stream = await openai.chat.completions.create(model=BASE, messages=HI, stream=True)
    with pytest.raises(APIError, match="internal error"):
        async for _ in stream:
            pass
    with pytest.raises(InternalServerError):
        await openai.chat.completions.create(model=BASE, messages=HI)


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
async def test_disconnect_frees_every_row(house: Any, body: dict[str, Any]) -> None:
    house.engine.script = lambda request: MockReply(token_ids=[5] * 100, delay=0.2)  # it takes longer than this test
    rows = body.get("n", 1)
    async with aiohttp.ClientSession(house.url) as session:
        request = {"prompt": "x", "max_tokens": 100, **body}
        task = asyncio.create_task(ask(session, request))
        await until(lambda: len(house.engine.requests) == rows)
        await until(lambda: all(row.produced for row in house.engine._rows.values()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(house.engine.aborted) == rows)
    assert (await house.engine.stats()).num_running == 0
    await until(lambda: house.services.lifecycle.num_inside == 0)


async def test_disconnect_while_waiting_in_the_queue_leaves_the_queue(house: Any) -> None:
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    async with aiohttp.ClientSession(house.url) as session:
        task = asyncio.create_task(ask(session, {"prompt": "x", "stream": True}))
        await until(lambda: len(house.engine.requests) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(house.engine.aborted) == 1)


async def test_reader_that_does_not_read_does_not_disturb_the_others(house: Any, ids: Ids) -> None:
    """A raw socket that never reads, while another caller is answered."""
    house.engine.script = says(ids, "abc" * 30)
    host, port = house.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    body = json.dumps({"prompt": ["x"] * 16, "n": 16, "max_tokens": 90, "stream": True, "logprobs": 5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    await until(lambda: len(house.engine.requests) == 256)
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(house.url) as session,
        session.post("/v1/completions", json={"prompt": "y", "max_tokens": 3}) as answer,
    ):
        assert answer.status == 200
    assert house.engine._rows  # what is not read is not generated without bound
    writer.transport.abort()
    await until(lambda: not house.engine._rows)
