"""Start and stop order: the only place that knows every concrete class.

Up: log, port, model, store, engine, HTTP (health answers, /ready says 503), warm-up, pinned adapters, ready.
Down: /ready says 503, running requests end, HTTP closes, the engine stops, the loader's threads end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from aiohttp import web
from rich.console import Console
from rich.progress import Progress

from lora_serve.adapter_source import AdapterSource
from lora_serve.adapters.catalog import Catalog
from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.dummy import dummy_adapter_ref
from lora_serve.adapters.loader import Loader, Pace
from lora_serve.adapters.registry import Registry
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.client.base import EngineClient
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import Evict, Pin
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import ConfigError, LoraServeError
from lora_serve.core.request import GenerateRequest
from lora_serve.core.settings import Settings
from lora_serve.engine.build import build_engine
from lora_serve.engine.messages import Message
from lora_serve.engine.warmup import warmup_stages
from lora_serve.engine_trial import EngineTrial
from lora_serve.logs import configure_logging
from lora_serve.model.build import build_model
from lora_serve.server.app import build_app
from lora_serve.server.metrics import Metrics
from lora_serve.server.services import Services
from lora_serve.tenancy.admin_key import load_admin_key
from lora_serve.tenancy.authenticator import Authenticator, auth_required
from lora_serve.text.tokenizer import TextModel

_log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Run the server until SIGTERM or SIGINT; the exit code. Raises ConfigError and ModelError before it listens."""
    configure_logging(settings.log_format)
    with _bound_socket(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    # The GIL is given up ten times sooner than by default: beside loads without a rest, 99 of 100 small steps of 200
    # operators then took up to 118 ms instead of 524 (the median 70 either way; 2 busy cores).
    sys.setswitchinterval(0.0005)
    stop = asyncio.Event()
    _on_signals(stop)
    with _timed(f"model {settings.model}"):
        parts = build_model(settings.model_slice(), settings.engine_slice(), settings.max_loras)
    text = TextModel.load(settings.model)
    catalog, store = _open_weights(settings.adapter_slice())
    admin_key = load_admin_key(settings.admin_key, settings.store)
    mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    source = AdapterSource(store, DiskStore(settings.store), parts)
    pace = Pace(lambda: engine.is_busy)
    loader = Loader(source.load, mailbox.put, settings.adapter_slice().load_threads, keep=source.keep, pace=pace)
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
        text=text,
        spec=parts.spec,
        config=settings.server_slice(),
        adapter_config=settings.adapter_slice(),
        authenticator=Authenticator(admin_key, auth_required(settings.auth, settings.host)),
        metrics=Metrics(settings.server_slice().served_model_name),
    )
    with closing(catalog), closing(loader):
        await _run(services, settings, listener, stop)
    _log.info("stopped")
    return 0


async def _run(services: Services, settings: Settings, listener: socket.socket, stop: asyncio.Event) -> None:
    async with _listening(services, listener):
        await services.client.start()
        try:
            await _register_modules(services, settings.lora_modules)
            await _warm_up(services, settings)
            services.lifecycle.ready()
            _log.info("ready: http://%s:%d (base model `%s`)", *listener.getsockname()[:2], services.base_name)
            await stop.wait()
            _log.info("draining %d requests", services.lifecycle.num_inside)
            if not await services.lifecycle.drain(settings.shutdown_timeout):
                _log.warning("%d requests did not end in time", services.lifecycle.num_inside)
        finally:
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
    """`--lora-modules NAME=PATH`: the operator's own, so any path will do. Raises ConfigError."""
    for module in modules:
        name, _, path = module.partition("=")
        try:
            await services.registry_thread.run(
                lambda name=name, path=path: services.registry.register_folder(name, path, trusted=True)
            )
        except LoraServeError as error:
            raise ConfigError(f"--lora-modules {module}: {error}") from error


async def _warm_up(services: Services, settings: Settings) -> None:
    """Dummy rows through the ordinary step, then the pinned adapters onto the device."""
    client, spec = services.client, services.spec
    dummy = dummy_adapter_ref(spec)
    stages = warmup_stages(settings.warmup, spec, settings.engine_slice(), dummy)
    pinned = [entry.ref() for entry in services.catalog.snapshot.entries.values() if entry.pinned]
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


def _open_weights(config: AdapterConfig) -> tuple[Catalog, AdapterStore]:
    catalog = Catalog(config.store)
    store: AdapterStore = DiskStore(config.store)
    if config.redis_url is not None:
        from lora_serve.adapters.stores.redis import RedisStore
        from lora_serve.adapters.stores.tiered import TieredStore

        store = TieredStore(DiskStore(config.store), RedisStore(config.redis_url))
    return catalog, store


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
