"""The cold-start contract over HTTP: real engine and model, and a store that gives an adapter when a test says so."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import APIStatusError, AsyncOpenAI

from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.sources.table import build_sources
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.client.verifier import EngineVerifier
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig, ServerConfig
from lora_serve.core.figures import Loaded
from lora_serve.core.messages import Evict
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import Loader
from lora_serve.engine.loop import Mail
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.model.build import build_model
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.validation import LocalValidator
from lora_serve.server.app import build_app
from lora_serve.server.background.caller_texts import GrammarChecks
from lora_serve.server.background.tasks import Staging
from lora_serve.server.services import Services
from lora_serve.server.telemetry.metrics import Metrics
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.authenticator import Authenticator, KeyTable
from lora_serve.tenancy.directory import open_directory
from lora_serve.text.tokenizer import TextModel
from tests.e2e.conftest import KEY, Site
from tests.loading import fetch_saved
from tests.verifying_registry import VerifyingRegistry

PROMPT = [5, 6, 7, 8, 9]
GREEDY = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True}}


@dataclass
class Gates:
    """Loads of a digest whose gate is closed do not end."""

    closed: dict[str, threading.Event] = field(default_factory=dict)

    def close(self, *refs: AdapterRef) -> None:
        self.closed.update({ref.digest: threading.Event() for ref in refs})

    def open(self, *refs: AdapterRef) -> None:
        for ref in refs:
            self.closed.pop(ref.digest).set()

    def wait(self, digest: str) -> None:
        gate = self.closed.get(digest)
        assert gate is None or gate.wait(60)


@dataclass(frozen=True)
class Place:
    """The running server, its store's gates, and two versions of one adapter."""

    services: Services
    gates: Gates
    url: str
    first: AdapterRef
    second: AdapterRef

    async def make_cold(self, *refs: AdapterRef) -> None:
        """Out of memory, and not to be had before its gate opens."""
        for ref in refs:
            await self.services.client.adapters(Evict(ref.digest))
        self.gates.close(*refs)

    async def until_here(self, ref: AdapterRef) -> None:
        """Its load must be under way: nothing is asked for here."""
        assert not await self.is_idle(ref)
        while ref.digest not in (await self.services.client.stats()).host_digests:
            pass

    async def is_idle(self, ref: AdapterRef) -> bool:
        stats = await self.services.client.stats()
        return ref.digest not in (*stats.loading_digests, *stats.host_digests)

    async def until_waiting(self) -> None:
        while not (await self.services.client.stats()).waiting_adapters:
            pass


@pytest.fixture
async def place(site: Site, tmp_path: Path) -> AsyncIterator[Place]:
    settings = Settings(
        model=str(site.model), served_model_name="tiny", store=tmp_path, max_model_len=96, kv_cache_memory=4 * 2**20,
        max_loras=4,
    )  # fmt: skip
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), settings.max_loras)
    text, gates, store = TextModel.load(settings.model), Gates(), DiskStore(tmp_path)
    mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()

    def fetch(ref: AdapterRef) -> Loaded[HostAdapter]:
        gates.wait(ref.digest)
        saved, times = fetch_saved(StoredBlobs(store, store), parts.spec, ref)
        return Loaded(parts.fold(saved), times)

    with (
        closing(open_catalog(tmp_path)) as catalog,
        open_directory(settings.part(AdapterConfig)) as directory,
        closing(Loader(fetch, mailbox.put, 4)) as loader,
    ):
        slices = settings.part(EngineConfig), settings.part(AdapterConfig)
        client = ThreadEngineClient(
            build_engine(parts.runner, parts.spec, parts.num_blocks, *slices, loader.submit),
            mailbox,
            QueueGate(slices[0].queue),
        )
        verifier = EngineVerifier(LocalValidator(parts.fold, parts.undo), client, asyncio.get_running_loop())
        registry = VerifyingRegistry(slices[1], parts.spec, catalog, store, verifier, BaseTokens(text.vocabulary()))
        services = Services(
            client=client,
            catalog=catalog,
            registry=registry,
            verifier=verifier,
            staging=Staging(build_sources(slices[1]), registry.new_folder, settings.max_upload_size),
            text=text,
            grammars=GrammarChecks(text, settings),
            spec=parts.spec,
            config=settings.part(ServerConfig),
            adapter_config=slices[1],
            authenticator=Authenticator(AdminKey.of(KEY), False),
            keys=KeyTable(directory),
            metrics=Metrics("tiny"),
        )
        await client.start()
        runner = web.AppRunner(build_app(services), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        services.lifecycle.ready()
        refs = [await _register(services, folder) for folder in (site.adapters["acme/a"], site.adapters["acme/b"])]
        yield Place(services, gates, f"http://127.0.0.1:{runner.addresses[0][1]}", *refs)
        for gate in gates.closed.values():
            gate.set()
        await runner.cleanup()
        await client.stop()
        services.registrations.close()


async def _register(services: Services, folder: Path) -> AdapterRef:
    registry = services.registry
    done = await services.registrations.run(lambda: registry.register_folder("acme/bot", folder, trusted=True))
    return done.ref


@pytest.fixture
async def openai(place: Place) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@dataclass(frozen=True)
class Told:
    """What a client got to know."""

    tokens: tuple[str, ...]
    model: str
    version: str
    fallback: str | None
    load: float  # milliseconds


async def ask(openai: AsyncOpenAI, model: str = "acme/bot", stream: bool = False, **cold: Any) -> Told:
    fields = {**GREEDY, "extra_body": {**GREEDY["extra_body"], **cold}, "logprobs": 0}
    raw = await openai.completions.with_raw_response.create(model=model, prompt=PROMPT, stream=stream, **fields)
    parsed = raw.parse()
    bodies = [chunk async for chunk in parsed] if stream else [parsed]
    (name,) = {body.model for body in bodies}
    tokens = [
        token for body in bodies for choice in body.choices if choice.logprobs for token in choice.logprobs.tokens
    ]
    load = float(raw.headers["Server-Timing"].partition("load;dur=")[2].partition(",")[0])
    headers = raw.headers
    return Told(tuple(tokens), name, headers["X-Adapter-Version"], headers.get("X-Adapter-Fallback"), load)


@pytest.mark.parametrize("stream", [False, True])
async def test_base_answers_while_the_adapter_is_loaded_for_the_next(
    place: Place, openai: AsyncOpenAI, stream: bool
) -> None:
    base, own = await ask(openai, "tiny"), await ask(openai)
    assert base.tokens != own.tokens
    await place.make_cold(place.second)
    told = await ask(openai, stream=stream, on_cold="base")
    assert told == Told(base.tokens, "tiny", "0", "base", 0.0)
    place.gates.open(place.second)
    await place.until_here(place.second)
    after = await ask(openai, stream=stream, on_cold="base")
    assert (after.tokens, after.model, after.version, after.fallback) == (own.tokens, "acme/bot", "2", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_base_answers_after_the_wait_and_load_says_how_long_it_was(
    place: Place, openai: AsyncOpenAI, stream: bool
) -> None:
    base = await ask(openai, "tiny")
    await place.make_cold(place.second)
    told = await ask(openai, stream=stream, on_cold="base", max_cold_wait_ms=60)
    assert (told.tokens, told.fallback) == (base.tokens, "base")
    assert 60 <= told.load < 30_000


async def test_version_before_answers_if_it_is_here(place: Place, openai: AsyncOpenAI) -> None:
    first, second = await ask(openai, "acme/bot@1"), await ask(openai)
    assert first.tokens != second.tokens
    await place.make_cold(place.second)
    told = await ask(openai, on_cold="previous")
    assert told == Told(first.tokens, "acme/bot", "1", "previous", 0.0)


@pytest.mark.parametrize("arrives", ["first", "second"])
async def test_whichever_version_arrives_first_answers(place: Place, openai: AsyncOpenAI, arrives: str) -> None:
    answers = {"first": await ask(openai, "acme/bot@1"), "second": await ask(openai)}
    await place.make_cold(place.first, place.second)
    asking = asyncio.create_task(ask(openai, on_cold="previous", max_cold_wait_ms=1))
    await place.until_waiting()
    place.gates.open(getattr(place, arrives))
    told = await asking
    assert told.tokens == answers[arrives].tokens
    assert told.version == answers[arrives].version
    assert told.fallback == ("previous" if arrives == "first" else None)
    assert told.load > 0


async def test_wait_ends_with_the_load_and_load_says_how_long_it_was(place: Place, openai: AsyncOpenAI) -> None:
    own = await ask(openai)
    await place.make_cold(place.second)
    asking = asyncio.create_task(ask(openai))
    await place.until_waiting()
    assert (await ask(openai, "tiny")).load == 0, "the base model is not held up"
    place.gates.open(place.second)
    told = await asking
    assert (told.tokens, told.fallback) == (own.tokens, None)
    assert told.load > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"on_cold": "fail"}, {"on_cold": "wait", "max_cold_wait_ms": 5}])
async def test_cold_adapter_is_a_503_and_is_loaded_for_the_next(
    place: Place, openai: AsyncOpenAI, fields: dict[str, Any], stream: bool
) -> None:
    own = await ask(openai)
    await place.make_cold(place.second)
    with pytest.raises(APIStatusError) as caught:
        await ask(openai, stream=stream, **fields)
    assert caught.value.status_code == 503
    assert caught.value.code == "adapter_unavailable"
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 120
    place.gates.open(place.second)
    await place.until_here(place.second)
    assert (await ask(openai, stream=stream, **fields)).tokens == own.tokens


async def test_timeout_ends_the_wait_for_either_version(place: Place, openai: AsyncOpenAI) -> None:
    await place.make_cold(place.first, place.second)
    with pytest.raises(APIStatusError) as caught:
        await ask(openai, on_cold="previous", timeout_ms=30)
    assert caught.value.status_code == 504


async def test_all_choices_of_a_chat_are_the_bases(place: Place, openai: AsyncOpenAI) -> None:
    await place.make_cold(place.second)
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "n": 3}
    base = await openai.chat.completions.create(model="tiny", **body)
    told = await openai.chat.completions.create(model="acme/bot", extra_body={"on_cold": "base"}, **body)
    assert told.model == "tiny"
    assert [choice.message.content for choice in told.choices] == [base.choices[0].message.content] * 3


async def test_client_that_leaves_while_it_waits_for_either_leaves_nothing_behind(place: Place) -> None:
    await place.make_cold(place.first, place.second)
    async with aiohttp.ClientSession(place.url) as http:
        body = {"model": "acme/bot", "prompt": PROMPT, "on_cold": "previous"}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await place.until_waiting()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    while (await place.services.client.stats()).num_waiting:
        pass
    place.gates.open(place.first, place.second)
    for ref in (place.first, place.second):
        await place.services.client.adapters(Evict(ref.digest))
    assert not (await place.services.client.stats()).host_digests
