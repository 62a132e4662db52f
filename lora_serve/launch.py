"""Start and stop order: the only place that knows every concrete class.

Up: log, port, model, store, engine, HTTP (health answers, /ready says 503), warm-up, pinned and hot adapters, ready.
Down: /ready says 503, running requests end, HTTP closes, the engine stops, the loader's threads end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, nullcontext, suppress

from aiohttp import web
from rich.console import Console
from rich.progress import Progress

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.follower import Follower
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.dummy import dummy_adapter, dummy_adapter_ref
from lora_serve.adapters.fetch import fetch_adapter
from lora_serve.adapters.loader import Loader
from lora_serve.adapters.registry import Registry
from lora_serve.adapters.sources.table import SourceTable, build_sources
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.client.base import EngineClient
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import Evict, Pin
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, LoraServeError
from lora_serve.core.request import GenerateRequest
from lora_serve.core.settings import Settings
from lora_serve.engine.build import build_engine
from lora_serve.engine.messages import Message
from lora_serve.engine.warmup import warmup_stages
from lora_serve.engine_trial import EngineTrial
from lora_serve.logs import configure_logging
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.host_adapter import HostAdapter
from lora_serve.server.app import build_app
from lora_serve.server.metrics import Metrics
from lora_serve.server.reconciler import pinned_refs
from lora_serve.server.services import Services
from lora_serve.server.staging import Staging
from lora_serve.tenancy.admin_key import load_admin_key
from lora_serve.tenancy.authenticator import Authenticator, auth_required
from lora_serve.text.tokenizer import TextModel
from lora_serve.warm_set import WarmSetKeeper

_log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Run the server until SIGTERM or SIGINT; the exit code. Raises ConfigError and ModelError before it listens."""
    configure_logging(settings.log_format)
    with _bound_socket(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    stop = asyncio.Event()
    _on_signals(stop)
    sources = build_sources(settings.adapter_slice())
    with _timed(f"model {settings.model}"):
        parts = build_model(settings.model_slice(), settings.engine_slice(), settings.max_loras)
    text = TextModel.load(settings.model)
    with _open_weights(settings.adapter_slice()) as (catalog, store):
        await _serve_adapters(settings, listener, stop, parts, text, catalog, store, sources)
    _log.info("stopped")
    return 0


async def _serve_adapters(
    settings: Settings,
    listener: socket.socket,
    stop: asyncio.Event,
    parts: ModelParts,
    text: TextModel,
    catalog: Catalog,
    store: DiskStore | TieredStore,
    sources: SourceTable,
) -> None:
    admin_key = load_admin_key(settings.admin_key, settings.store)
    mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    loader = Loader(functools.partial(_fetch, store, parts), mailbox.put)
    engine = build_engine(
        parts.runner, parts.spec, parts.num_blocks, settings.engine_slice(), settings.adapter_slice(), loader.submit
    )
    client = ThreadEngineClient(engine, mailbox)
    trial = EngineTrial(parts.fold, parts.undo, client, asyncio.get_running_loop())
    base_tokens = BaseTokens(text.vocabulary())
    registry = Registry(settings.adapter_slice(), parts.spec, catalog, store, trial, base_tokens)
    registry.sweep()
    services = Services(
        client=client,
        catalog=catalog,
        registry=registry,
        staging=Staging(sources, registry.new_folder, settings.max_upload_size),
        text=text,
        spec=parts.spec,
        config=settings.server_slice(),
        adapter_config=settings.adapter_slice(),
        authenticator=Authenticator(admin_key, auth_required(settings.auth, settings.host)),
        metrics=Metrics(settings.server_slice().served_model_name),
        store=store,
    )
    with closing(loader):
        await _run(services, settings, listener, stop)


async def _run(services: Services, settings: Settings, listener: socket.socket, stop: asyncio.Event) -> None:
    async with _listening(services, listener):
        await services.client.start()
        try:
            await _register_modules(services, settings.lora_modules)
            await _warm_up(services, settings)
            async with await _hot_adapters(services, settings):
                services.lifecycle.ready()
                _log.info("ready: http://%s:%d (base model `%s`)", *listener.getsockname()[:2], services.base_name)
                await stop.wait()
                _log.info("draining %d requests", services.lifecycle.num_inside)
                if not await services.lifecycle.drain(settings.shutdown_timeout):
                    _log.warning("%d requests did not end in time", services.lifecycle.num_inside)
        finally:
            services.staging.close()
            await services.background.close()
            await services.client.stop()
            await asyncio.to_thread(services.registry_thread.close)


@asynccontextmanager
async def _listening(services: Services, listener: socket.socket) -> AsyncIterator[None]:
    """HTTP, for as long as the block lasts. A client that leaves cancels its handler, which frees its row."""
    runner = web.AppRunner(build_app(services), handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        yield
    finally:
        await runner.cleanup()


async def _register_modules(services: Services, modules: tuple[str, ...]) -> None:
    """`--lora-modules NAME=SOURCE`: the operator's own, so any path will do. Raises ConfigError."""
    for module in modules:
        name, _, source = module.partition("=")
        try:
            await _register_module(services, name, source)
        except LoraServeError as error:
            raise ConfigError(f"--lora-modules {module}: {error}") from error


async def _register_module(services: Services, name: str, source: str) -> None:
    registry = services.registry
    if "://" in source:
        staged = await services.staging.stage(source)
        call = functools.partial(registry.register_staged, name, staged.folder, staged.source)
    else:
        call = functools.partial(registry.register_folder, name, source, trusted=True)
    await services.registry_thread.run(call)


async def _warm_up(services: Services, settings: Settings) -> None:
    """Dummy rows through the ordinary step, then the pinned adapters onto the device."""
    client, spec = services.client, services.spec
    dummy = dummy_adapter_ref(spec)
    stages = warmup_stages(settings.warmup, spec, settings.engine_slice(), dummy)
    pinned = pinned_refs(services.catalog.snapshot).values()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warm-up", total=len(stages) + len(pinned))
        for stage in stages:
            progress.update(task, description=f"warm-up: {stage.name}")
            with _timed(f"warm-up: {stage.name}"):
                await asyncio.gather(*(_exhaust(client, request) for request in stage.requests))
            progress.advance(task)
        if stages:
            await client.adapters(Evict(dummy.digest, forget=True))
        for ref in pinned:
            progress.update(task, description=f"warm-up: {ref.label}")
            await _pin(client, ref)
            progress.advance(task)


async def _hot_adapters(services: Services, settings: Settings) -> AbstractAsyncContextManager[None]:
    """The last run's hot adapters onto the device; while the context lasts, host memory follows and both are noted."""
    if settings.warmup == "off":
        return nullcontext()
    keeper = WarmSetKeeper(services.client, services.catalog, settings.adapter_slice())
    with _timed("hot adapters of the last run"):
        await keeper.warm_device()
    return keeper.keeping()


async def _exhaust(client: EngineClient, request: GenerateRequest) -> None:
    async for _ in client.generate(request):
        pass


async def _pin(client: EngineClient, ref: AdapterRef) -> None:
    """A pinned adapter that cannot be had is said and left out: the others are served."""
    with _timed(f"pinned adapter {ref.label}"):
        try:
            await client.adapters(Pin(ref))
        except LoraServeError as error:
            _log.error("the pinned adapter %s cannot be loaded: %s", ref.label, error)


@contextmanager
def _open_weights(config: AdapterConfig) -> Iterator[tuple[Catalog, DiskStore | TieredStore]]:
    """The catalog, and the store of what it names; with a shared registry, both follow what other replicas do."""
    with closing(open_catalog(config.store, config.redis_url, config.redis_prefix)) as catalog:
        if config.redis_url is None:
            yield catalog, DiskStore(config.store, config.disk_bytes, policy=config.eviction)
            return
        from lora_serve.adapters.stores.redis import RedisStore

        cache = DiskStore(config.store / "cache", config.disk_bytes, is_cache=True, policy=config.eviction)
        store = TieredStore(cache, RedisStore(config.redis_url, f"{config.redis_prefix}:adapters:"))
        with closing(Follower(catalog, lambda: _replenish(store, catalog))) as follower:
            follower.start()
            yield catalog, store


def _replenish(store: TieredStore, catalog: Catalog) -> None:
    """Redis lost something, or was away: what it should have and is here is given back."""
    with suppress(AdapterUnavailableError):  # away again; its return is another chance
        store.replenish(catalog.snapshot.digests)


def _fetch(store: AdapterStore, parts: ModelParts, adapter: AdapterRef) -> HostAdapter:
    """What the loader's threads call: a reference to verified host tensors, ready for the base model."""
    is_dummy = adapter.digest == dummy_adapter_ref(parts.spec).digest
    return parts.fold(dummy_adapter(parts.spec) if is_dummy else fetch_adapter(store, parts.spec, adapter))


def _bound_socket(host: str, port: int) -> socket.socket:
    """The port is taken before the model is loaded; nobody is let in before the site starts to listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from error
    return listener


def _on_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once."""

    def handle() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    _log.info("%s: %.2f s", what, time.perf_counter() - start)
