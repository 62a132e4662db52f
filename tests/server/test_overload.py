"""What callers see when the queue is full: 503 or 429, when to come again, and nothing done for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate
from tests.mock_engine import MockReply
from tests.server.conftest import BASE, House

Post = Callable[[dict[str, Any]], Any]


@pytest.fixture
def post(http: aiohttp.ClientSession) -> Post:
    async def send(body: dict[str, Any]) -> tuple[aiohttp.ClientResponse, dict[str, Any]]:
        async with http.post("/v1/completions", json={"model": BASE, "max_tokens": 2, **body}) as response:
            return response, await response.json()

    return send


@asynccontextmanager
async def waiting(house: House, post: Post, limits: QueueLimits, num_requests: int) -> AsyncIterator[None]:
    """While the block lasts so many requests wait; at its end they are all answered."""
    house.engine.gate = QueueGate(limits)
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(post({"prompt": [1, 2, 3]})) for _ in range(num_requests)]
        while len(house.engine.requests) < num_requests:
            await asyncio.sleep(0.001)
        yield
        gate.set()
    assert [task.result()[0].status for task in sent] == [200] * num_requests
    assert house.engine.gate.num_requests == 0


async def test_full_queue_is_503_with_retry_after(house: House, post: Post) -> None:
    async with waiting(house, post, QueueLimits(max_queue=2), 2):
        response, body = await post({"prompt": [1]})
        assert (response.status, body["error"]["code"], body["error"]["type"]) == (503, "overloaded", "server_error")
        assert response.headers["Retry-After"] == "1"
    response, _ = await post({"prompt": [1]})
    assert response.status == 200


async def test_full_queue_refuses_before_a_prompt_is_tokenised(
    house: House, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting(house, post, QueueLimits(max_queue=2), 2):
        monkeypatch.setattr(type(house.services.text), "encode", lambda *_: pytest.fail("tokenised"))
        response, _ = await post({"prompt": "long " * 10_000})
        assert response.status == 503


async def test_tenant_at_its_limit_is_429_with_its_limits(house: House, post: Post) -> None:
    limits = QueueLimits(max_queue=100, max_tenant_queue=3, max_tenant_queue_tokens=40)
    async with waiting(house, post, limits, 2):
        response, body = await post({"prompt": [1], "n": 2})
        assert (response.status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        shown = {name.lower(): value for name, value in response.headers.items()}
        assert shown["retry-after"] == "1"
        assert shown["x-ratelimit-limit-requests"] == "3"
        assert shown["x-ratelimit-remaining-requests"] == "1"
        assert shown["x-ratelimit-limit-tokens"] == "40"
        assert shown["x-ratelimit-remaining-tokens"] == "34"


@pytest.mark.parametrize(
    "body", [{"prompt": [1], "n": 2}, {"prompt": [[1], [2]]}, {"prompt": [1], "n": 2, "stream": True}]
)
async def test_answer_of_several_requests_is_refused_whole(house: House, post: Post, body: dict[str, Any]) -> None:
    async with waiting(house, post, QueueLimits(max_queue=3), 2):
        response, _ = await post(body)
        assert response.status == 503
        assert len(house.engine.requests) == 2, "none of it was begun"
        assert house.engine.gate.num_requests == 2


async def test_choices_of_one_answer_that_fit_are_all_begun(house: House, post: Post) -> None:
    async with waiting(house, post, QueueLimits(max_queue=4), 1):
        sent = asyncio.create_task(post({"prompt": [1], "n": 3}))
        while len(house.engine.requests) < 4:
            await asyncio.sleep(0.001)
        assert house.engine.gate.num_requests == 4
    _, body = await sent
    assert len(body["choices"]) == 3


async def test_refusals_are_counted_by_reason(house: House, http: aiohttp.ClientSession, post: Post) -> None:
    async with waiting(house, post, QueueLimits(max_queue=2, max_tenant_queue_tokens=10), 1):
        await post({"prompt": [1] * 9})
        await post({"prompt": [1], "n": 2})
        await post({"prompt": [1], "n": 2})
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'lora_serve_requests_refused_total{reason="queue_requests"} 2.0' in lines
    assert 'lora_serve_requests_refused_total{reason="tenant_tokens"} 1.0' in lines
    assert 'lora_serve_requests_refused_total{reason="queue_tokens"} 0.0' in lines


async def test_probes_and_admin_answer_while_the_queue_is_full(
    house: House, admin: aiohttp.ClientSession, post: Post
) -> None:
    async with waiting(house, post, QueueLimits(max_queue=1), 1):
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/admin/engine", "/admin/fleet"):
            async with admin.get(path) as response:
                assert response.status == 200, path


async def test_caller_who_leaves_the_queue_makes_room(house: House, http: aiohttp.ClientSession, post: Post) -> None:
    house.engine.gate = QueueGate(QueueLimits(max_queue=1))
    never = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=never if len(request.prompt_token_ids) == 3 else None)
    impatient = asyncio.create_task(post({"prompt": [1, 2, 3]}))
    while house.engine.gate.num_requests == 0:
        await asyncio.sleep(0.001)
    impatient.cancel()
    while house.engine.gate.num_requests == 1:
        await asyncio.sleep(0.001)
    response, _ = await post({"prompt": [1]})
    assert response.status == 200
