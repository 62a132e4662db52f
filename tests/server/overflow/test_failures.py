"""Neighbours that refuse, hang, lie or break: before a token was shown nobody notices, afterwards it is said."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import APIError, AsyncOpenAI

from lora_serve.core.errors import NumericalError
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.server.overflow.neighbour import Breaker, BreakerState
from lora_serve.server.services import Services
from tests.mock_engine import MockReply
from tests.server.conftest import House
from tests.server.overflow.conftest import Actor, Busy, chunk, never, outcomes, overflow_of, streams

DONE = b"data: [DONE]\n\n"
END = chunk(token_ids=[], finish_reason="stop")


def status(code: int, **headers: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=code, headers=headers)

    return answer


async def as_html(request: web.Request) -> web.Response:
    return web.Response(text="<html>welcome</html>", content_type="text/html")


async def elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPTemporaryRedirect("http://example.org/v1/completions")


def of_another_version(request: web.Request) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Adapter-Digest": "sha256:other"})
        await response.prepare(request)
        await response.write(chunk(token_ids=[5], text="x") + END + DONE)
        return response

    return answer(request)


REFUSALS: list[Any] = [
    pytest.param(status(404), "unknown_model", id="404"),
    pytest.param(status(400), "refused", id="400"),
    pytest.param(status(401), "forbidden", id="401"),
    pytest.param(status(429), "busy", id="429"),
    pytest.param(status(500), "failed", id="500"),
    pytest.param(status(503), "busy", id="503"),
    pytest.param(elsewhere, "refused", id="redirect"),
    pytest.param(as_html, "garbled", id="html"),
    pytest.param(of_another_version, "unknown_model", id="another version"),
    pytest.param(streams(b"data: {not json\n\n"), "garbled", id="no json"),
    pytest.param(streams(b'data: {"choices": 7}\n\n'), "garbled", id="no choices"),
    pytest.param(streams(b'data: {"usage": ' + b"[" * 10_000 + b"\n\n"), "garbled", id="lists in lists"),
    pytest.param(streams(b'data: {"choices": [{"text": "\xff"}]}\n\n'), "garbled", id="no UTF-8"),
    pytest.param(streams(b'data: {"error": {"message": "x"}}\n\n'), "failed", id="an error event"),
    pytest.param(streams(chunk(text="words"), END, DONE), "garbled", id="no token ids"),
    pytest.param(streams(chunk(token_ids=[10**9], text="x")), "garbled", id="no token of the vocabulary"),
    pytest.param(streams(chunk(token_ids=[-1], text="x")), "garbled", id="a negative token"),
    pytest.param(streams(b"data: " + b"x" * 2**20), "garbled", id="a line without end"),
    pytest.param(streams(*[b": nothing\n" * 2**13] * 100), "garbled", id="a stream without end"),
    pytest.param(streams(breaks=True), "broken", id="breaks at once"),
    pytest.param(streams(b""), "broken", id="ends at once"),
    pytest.param(never, "slow", id="hangs"),
]


@pytest.fixture
def overflow_config(actor: Actor) -> OverflowConfig:
    return OverflowConfig(overflow=(f"near={actor.url}",), overflow_after_ms=0, overflow_timeout_ms=200)


@pytest.mark.many(8)
@pytest.mark.parametrize(("answer", "outcome"), REFUSALS)
async def test_failure_before_the_first_token_is_not_the_callers(
    busy: Busy, actor: Actor, http: aiohttp.ClientSession, answer: Any, outcome: str
) -> None:
    actor.answer = answer
    (neighbour,) = overflow_of(busy.house).neighbours
    waiting = []
    for stream in (False, True):
        waiting.append(asyncio.create_task(asked(http, stream)))
        async with asyncio.timeout(10):
            while busy.num_here < len(waiting):
                await asyncio.sleep(0.001)
        neighbour.breaker = Breaker()
        neighbour._unknown.clear()
    busy.end()
    for answered in await asyncio.gather(*waiting):
        assert (answered.status, "X-Served-By" in answered.headers) == (200, False)
    assert len(actor.bodies) == 2
    assert await outcomes(busy.house) == {outcome: 2}


async def asked(http: aiohttp.ClientSession, stream: bool = False, **more: Any) -> aiohttp.ClientResponse:
    body = {"prompt": "x", "max_tokens": 5, "stream": stream, "model": "tiny-base", **more}
    async with http.post("/v1/completions", json=body) as answered:
        await answered.read()
        return answered


BROKEN: list[Any] = [
    pytest.param(streams(chunk(token_ids=[65], text="a"), breaks=True), id="breaks"),
    pytest.param(streams(chunk(token_ids=[65], text="a")), id="ends without an end"),
    pytest.param(streams(chunk(token_ids=[65], text="a"), b'data: {"error": {"code": 500}}\n\n'), id="an error"),
    pytest.param(streams(chunk(token_ids=[65] * 6, text="aaaaaa"), END, DONE), id="more tokens than asked for"),
    pytest.param(streams(chunk(token_ids=[65], text="a", finish_reason="abort"), DONE), id="aborted"),
]


@pytest.mark.parametrize("answer", BROKEN)
async def test_stream_that_breaks_after_its_first_token_says_retry(
    busy: Busy, actor: Actor, openai: AsyncOpenAI, answer: Any
) -> None:
    actor.answer = answer
    texts = []

    async def read() -> None:
        async for part in await openai.completions.create(model="tiny-base", prompt="x", max_tokens=5, stream=True):
            texts.append(part.choices[0].text)

    with pytest.raises(APIError, match="retry the request") as caught:
        await read()
    assert caught.value.code == "neighbour_lost"
    assert texts
    assert busy.num_here == 0


@pytest.mark.parametrize("answer", BROKEN)
async def test_whole_answer_that_breaks_is_computed_here(
    busy: Busy, actor: Actor, http: aiohttp.ClientSession, answer: Any
) -> None:
    actor.answer = answer
    waiting = asyncio.create_task(asked(http))
    async with asyncio.timeout(10):
        while busy.num_here == 0:
            await asyncio.sleep(0.001)
    busy.end()
    answered = await waiting
    body = json.loads(answered._body or b"")
    assert (answered.status, body["usage"]["completion_tokens"], "X-Served-By" in answered.headers) == (200, 5, False)


@pytest.mark.parametrize(
    ("drips", "limits"),
    [(False, {"overflow_gap_ms": 50}), (True, {"overflow_gap_ms": 5000, "overflow_answer_ms": 300})],
)
async def test_silence_in_the_middle_and_drops_without_end_end_the_stream(
    busy: Busy, actor: Actor, openai: AsyncOpenAI, services: Services, drips: bool, limits: dict[str, float]
) -> None:
    assert services.overflow is not None
    services.overflow._config = replace(services.overflow._config, **limits)

    async def falls_silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk(token_ids=[65], text="a"))
        while drips:
            await asyncio.sleep(0.1)
            await response.write(chunk(token_ids=[65], text="a"))
        return await never(request)

    actor.answer = falls_silent
    stream = await openai.completions.create(model="tiny-base", prompt="x", max_tokens=60, stream=True)
    async with asyncio.timeout(3):
        with pytest.raises(APIError, match="retry the request"):
            [part async for part in stream]


async def test_requests_own_deadline_holds_there_too(busy: Busy, actor: Actor, http: aiohttp.ClientSession) -> None:
    answered = await asked(http, timeout_ms=50)
    assert answered.status == 504
    assert busy.num_here == 0


async def test_error_of_the_row_here_is_the_callers(busy: Busy, actor: Actor, http: aiohttp.ClientSession) -> None:
    actor.answer = status(500)
    busy.house.engine.script = lambda request: MockReply(error=NumericalError("not finite"))
    assert (await asked(http)).status == 500
    assert busy.num_here == 1


class TestDeadNeighbour:
    @pytest.fixture
    def overflow_config(self) -> OverflowConfig:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        return OverflowConfig(overflow=(f"gone=http://127.0.0.1:{port}",), overflow_after_ms=0)

    async def test_it_is_asked_once_and_then_left_alone(
        self, house: House, busy: Busy, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        waiting = [asyncio.create_task(asked(http)) for _ in range(20)]
        async with asyncio.timeout(10):
            while busy.num_here < 20:
                await asyncio.sleep(0.001)
        busy.end()
        assert [answered.status for answered in await asyncio.gather(*waiting)] == [200] * 20
        assert overflow_of(house).neighbours[0].breaker.state is BreakerState.OPEN
        assert not overflow_of(house).neighbours[0].may_be_asked(1, "", "")
        (probed,) = [record for record in caplog.get_records("setup") if "overflow" in record.message]
        assert "the neighbour gone does not answer GET /v1/models" in probed.message


async def test_neighbour_that_is_back_is_asked_again(busy: Busy, actor: Actor, http: aiohttp.ClientSession) -> None:
    (neighbour,) = overflow_of(busy.house).neighbours
    actor.answer = status(503)
    waiting = asyncio.create_task(asked(http))
    async with asyncio.timeout(10):
        while neighbour.breaker.state is not BreakerState.OPEN:
            await asyncio.sleep(0.001)
        actor.answer = streams(chunk(token_ids=[65], text="a"), END, DONE)
        since, known = time.monotonic(), actor.num_probes
        while neighbour.breaker.state is not BreakerState.HALF_OPEN:
            await asyncio.sleep(0.01)
    assert time.monotonic() - since > 0.5
    assert actor.num_probes == known + 1
    assert (await asked(http)).headers["X-Served-By"] == "near"
    assert neighbour.breaker.state is BreakerState.CLOSED
    busy.end()
    assert (await waiting).status == 200


async def test_unknown_model_is_not_asked_for_again(busy: Busy, actor: Actor, http: aiohttp.ClientSession) -> None:
    actor.answer = status(404)
    waiting = [asyncio.create_task(asked(http))]
    async with asyncio.timeout(10):
        while busy.num_here < 1:
            await asyncio.sleep(0.001)
        waiting.append(asyncio.create_task(asked(http)))
        while busy.num_here < 2:
            await asyncio.sleep(0.001)
    busy.end()
    assert [answered.status for answered in await asyncio.gather(*waiting)] == [200, 200]
    assert len(actor.bodies) == 1
