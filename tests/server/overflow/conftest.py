"""A server with neighbours: a second one of the same kind, or one that plays a part; its own engine is busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.server.overflow.decision import Overflow
from lora_serve.server.services import Services
from lora_serve.tenancy.directory import open_directory
from lora_serve.text.tokenizer import TextModel
from tests.fake_verifier import FakeVerifier
from tests.mock_engine import MockReply
from tests.server.conftest import House, opened_house, opened_services

KEY = "a-key-of-the-neighbour"


@pytest.fixture
async def neighbour(
    tmp_path: Path,
    text_model: TextModel,
    spec: ModelSpec,
    adapter_config: AdapterConfig,
    server_config: ServerConfig,
    make_adapter: Callable[..., Path],
) -> AsyncIterator[House]:
    """A second server, with a store and tenants of its own."""
    folder, verifier = tmp_path / "neighbour", FakeVerifier()
    config = replace(adapter_config, store=folder / "store")
    with closing(open_catalog(config.store)) as catalog, open_directory(config) as directory:
        async with (
            opened_services(text_model, spec, catalog, directory, verifier, config, server_config, False) as services,
            opened_house(services, verifier, folder, make_adapter) as house,
        ):
            yield house


@pytest.fixture
def overflow_config(neighbour: House) -> OverflowConfig:
    return OverflowConfig(overflow=(f"near={neighbour.url}",), overflow_after_ms=0, overflow_api_key=KEY)


@pytest.fixture
async def services(services: Services, overflow_config: OverflowConfig) -> Services:
    may_leave = services.keys.directory.may_leave
    overflow = Overflow(overflow_config, services.client, services.metrics.registry, may_leave)
    return replace(services, overflow=overflow)


@dataclass
class Busy:
    """The engine of a server in which one request waits, and others behind it until `end`."""

    house: House
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """All that wait are computed."""
        self.gate.set()

    @property
    def num_here(self) -> int:
        """Requests of callers that this engine was given."""
        return len(self.house.engine.requests) - 1


@pytest.fixture
async def busy(house: House, openai: AsyncOpenAI) -> AsyncIterator[Busy]:
    busy = Busy(house)
    house.engine.script = lambda request: MockReply(gate=busy.gate)
    first = asyncio.create_task(openai.completions.create(model="tiny-base", prompt="first"))
    async with asyncio.timeout(10):
        while house.services.client.gate.num_requests == 0:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.002)  # the wait so far is the forecast
    yield busy
    busy.end()
    await first


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Actor:
    """A neighbour that answers as `answer` says."""

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    num_probes: int = 0
    url: str = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        return await self.answer(request)

    async def models(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        return web.json_response({"object": "list", "data": [{"id": "tiny-base"}]})


async def never(request: web.Request) -> web.StreamResponse:
    """No answer."""
    await asyncio.sleep(60)
    return web.Response()


def chunk(**choice: Any) -> bytes:
    """A chunk of a completion as an event."""
    made = {"id": "x", "object": "text_completion", "model": "theirs", "choices": [{"index": 0, "text": "", **choice}]}
    return b"data: " + json.dumps(made).encode() + b"\n\n"


def streams(*parts: bytes, breaks: bool = False) -> Answer:
    """A stream of these bytes; one that `breaks` loses its connection then."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if breaks:
            assert request.transport is not None
            await asyncio.sleep(0.01)
            request.transport.abort()
        return response

    return answer


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    actor = Actor(never)
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", actor.completions)
    app.router.add_post("/v1/embeddings", actor.completions)
    app.router.add_get("/v1/models", actor.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    actor.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield actor
    await runner.cleanup()


async def outcomes(house: House) -> dict[str, float]:
    """The rows that neighbours were asked for, by outcome, of those that occurred."""
    found: dict[str, float] = {}
    for family in house.services.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "lora_serve_overflow_requests_total" and sample.value:
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0) + sample.value
    return found


def overflow_of(house: House) -> Overflow:
    overflow = house.services.overflow
    assert overflow is not None
    return overflow
