"""Starting, ready, draining, dead; and who may enter when authentication is on."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, AuthenticationError, InternalServerError

from lora_serve import __version__
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.server.lifecycle import Lifecycle, ServerState
from tests.mock_engine import MockReply

KEY = "admin-key-of-the-tests"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def status_of(http: aiohttp.ClientSession, path: str) -> int:
    async with http.get(path) as answer:
        assert (answer.status == 503) == ("Retry-After" in answer.headers)
        return answer.status


async def test_ready_server_says_so(http: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert await status_of(http, path) == 200
    async with http.get("/version") as answer:
        kernels = {"level": "none", "dtype": "float32", "order": "none", "source": "torch"}  # not why there are none
        assert await answer.json() == {"version": __version__, "kernels": kernels}


async def test_starting_server_is_alive_but_lets_nobody_in(http: aiohttp.ClientSession, house: Any) -> None:
    house.services.lifecycle.state = ServerState.STARTING
    assert await status_of(http, "/health") == 200
    assert await status_of(http, "/ready") == 503
    assert await status_of(http, "/v1/models") == 200
    async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "not_ready")
        assert answer.headers["Retry-After"]
    assert house.engine.requests == []


async def test_probe_is_logged_when_its_status_changes_and_at_no_other_time(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = house.services.lifecycle
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        for state in (ServerState.READY, ServerState.STARTING, ServerState.READY, ServerState.FAILED):
            lifecycle.state = state
            for path in ("/ready", "/health", "/ready/", "/health", "/ready", "/metrics", "/ui/about.json"):
                await status_of(http, path)
            async with http.get(
                "/admin/whoami", headers={"Authorization": f"Bearer {KEY}"}
            ) as answer:  # the console asks each 5 s
                assert answer.status == 200
    lines: list[Any] = [record for record in caplog.records if record.name == "lora_serve.access"]
    assert [(line.path, line.status) for line in lines] == [
        ("/ready", 503),
        ("/ready", 200),
        ("/ready", 503),
        ("/health", 503),
    ]


async def test_other_refusals_are_logged_each_time(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house.services.lifecycle.state = ServerState.STARTING
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        for _ in range(3):
            async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 503
            async with http.delete("/ready") as answer:
                assert answer.status == 405
    assert len([record for record in caplog.records if record.name == "lora_serve.access"]) == 6


async def test_draining_server_lets_nobody_in_and_those_inside_finish(
    http: aiohttp.ClientSession, openai: AsyncOpenAI, house: Any
) -> None:
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    inside = asyncio.create_task(openai.chat.completions.create(model="tiny-base", messages=HI, max_tokens=2))
    async with asyncio.timeout(60):
        while not house.engine.requests:
            await asyncio.sleep(0.005)
    drained = asyncio.create_task(house.services.lifecycle.drain(600.0))
    await asyncio.sleep(0.02)
    assert await status_of(http, "/ready") == 503
    with pytest.raises(InternalServerError, match="shutting down"):
        await openai.chat.completions.create(model="tiny-base", messages=HI)
    async with http.post("/v1/completions", json={"prompt": "x"}) as refused:
        assert refused.headers["Connection"] == "close", "the next request would find the connection gone"
    assert not drained.done()
    gate.set()
    assert (await inside).choices[0].message.content
    assert await drained is True


async def test_drain_gives_up_after_its_time() -> None:
    lifecycle = Lifecycle()
    lifecycle.ready()
    with lifecycle.inside():
        assert await lifecycle.drain(0.01) is False
    assert await lifecycle.drain(0.01) is True


async def test_nobody_enters_a_failed_server_and_ready_does_not_heal_it() -> None:
    lifecycle = Lifecycle()
    lifecycle.fail("the engine is dead")
    lifecycle.ready()
    with pytest.raises(NotReadyError, match="the engine is dead"), lifecycle.inside():
        pass


async def test_health_tells_a_dead_engine(http: aiohttp.ClientSession, house: Any) -> None:
    async def dead() -> Any:
        raise NotReadyError("The engine is not running.")

    house.engine.stats = dead
    assert await status_of(http, "/health") == 503
    house.services.lifecycle.fail("The engine is dead.")
    assert await status_of(http, "/health") == 503
    assert await status_of(http, "/ready") == 503


async def test_engine_that_is_lost_while_it_is_asked_is_no_dead_server(http: aiohttp.ClientSession, house: Any) -> None:
    """It is started again; whoever watches must not end the server meanwhile."""

    async def lost() -> Any:
        raise EngineLostError("The engine stopped unexpectedly and is being restarted; try again.")

    house.engine.stats = lost
    assert await status_of(http, "/health") == 200


async def test_engine_in_a_long_step_is_not_dead_and_holds_up_no_probe(http: aiohttp.ClientSession, house: Any) -> None:
    """Kubernetes' probes wait for a second, if they are not told otherwise."""

    async def busy() -> Any:
        await asyncio.sleep(60)

    house.engine.stats = busy
    started = time.monotonic()
    assert [await status_of(http, "/health") for _ in range(3)] == [200] * 3
    assert time.monotonic() - started < 3  # three times 0.05, and a busy machine


class TestWithAuthentication:
    """`--auth on`, or any address but loopback."""

    @pytest.fixture
    def auth_required(self) -> bool:
        return True

    async def test_inference_needs_a_key(self, openai: AsyncOpenAI, house: Any) -> None:
        with pytest.raises(AuthenticationError):
            await openai.chat.completions.create(model="tiny-base", messages=HI)
        with pytest.raises(AuthenticationError):
            await openai.models.list()
        assert house.engine.requests == []
        allowed = openai.with_options(api_key=KEY)
        assert (await allowed.chat.completions.create(model="tiny-base", messages=HI, max_tokens=1)).choices

    async def test_nothing_but_health_and_metrics_is_open(self, http: aiohttp.ClientSession) -> None:
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert await status_of(http, path) == 200
        for path in ("/v1/models", "/v1/models/tiny-base", "/tokenizer_info"):
            assert await status_of(http, path) == 401
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
        for path in (*paths, "/classify", "/v1/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
            async with http.post(path, json={}) as answer:
                assert answer.status == 401

    async def test_wrong_key_is_told_before_the_body_is_read(self, http: aiohttp.ClientSession) -> None:
        headers = {"Authorization": "Bearer wrong"}
        async with http.post("/v1/completions", data=b"x" * 10**6, headers=headers) as answer:
            assert answer.status == 401
