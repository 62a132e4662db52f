"""Start and stop order: the only place that knows every concrete class.

Up: log, port, model, store, engine, HTTP (health answers, /ready says 503), warm-up, pinned adapters, ready.
Down: /ready says 503, running requests end, HTTP closes, the engine stops, the loader's threads end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager

from lora_serve.adapter_source import AdapterSource
from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.loader import Loader, Pace
from lora_serve.adapters.registry import Registry
from lora_serve.adapters.sources.table import SourceTable, build_sources
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.engine.build import build_engine
from lora_serve.engine.engine import Engine
from lora_serve.engine.messages import Message
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine_trial import AdaptersAtHand, EngineTrial
from lora_serve.log_places import log_redaction
from lora_serve.logs import configure_logging, timed
from lora_serve.model.allocator import return_freed_memory
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.host_adapter import HostAdapter
from lora_serve.model.threads import stand_aside
from lora_serve.server.app import build_app
from lora_serve.server.background import WorkerThread
from lora_serve.server.connections import CONNECTIONS, GuardedSite
from lora_serve.server.exposure import check_exposure
from lora_serve.server.http_runner import HttpRunner
from lora_serve.server.lifecycle import Lifecycle, ServerState
from lora_serve.server.metrics import Metrics
from lora_serve.server.request_traces import RequestTraces
from lora_serve.server.services import Services
from lora_serve.server.staging import Staging
from lora_serve.server.tls import ServerTls
from lora_serve.tenancy.admin_key import load_admin_key
from lora_serve.tenancy.authenticator import Authenticator, auth_required
from lora_serve.tenancy.key_table import KeyTable
from lora_serve.tenancy.opening import open_directory
from lora_serve.text.tokenizer import TextModel
from lora_serve.traces import opened_traces
from lora_serve.warm_up import hot_adapters, prepare
from lora_serve.weights import Weights, open_weights

_log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Run the server until SIGTERM or SIGINT; the exit code. Raises ConfigError and ModelError before it listens."""
    _keep_to_oneself()
    configure_logging(settings.log_format, redaction=log_redaction(settings))
    tls = None if (config := settings.tls_slice()) is None else ServerTls(config)
    with (
        _bound_socket(settings.host, settings.port) as listener,
        opened_traces(settings.otlp_traces_endpoint) as traces,
    ):
        check_exposure(settings.server_slice(), listener)
        return asyncio.run(_serve(settings, listener, tls, traces))


def _keep_to_oneself() -> None:
    """What is written, by a library too, is for this user only; a crash leaves no memory, with its keys, on disk."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


async def _serve(
    settings: Settings, listener: socket.socket, tls: ServerTls | None, traces: RequestTraces | None
) -> int:
    # The GIL is given up ten times sooner than by default: beside loads without a rest, 99 of 100 small steps of 200
    # operators then took up to 118 ms instead of 524 (the median 70 either way; 2 busy cores).
    sys.setswitchinterval(0.0005)
    stand_aside()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8, "asyncio", initializer=stand_aside))
    stop = asyncio.Event()
    _on_signals(stop, tls)
    sources = build_sources(settings.adapter_slice())
    with _without_collections(), timed(f"model {settings.model}"):
        parts = _built_on_a_thread_of_its_own(settings)
        text = TextModel.load(settings.model)
    gc.freeze()
    with open_weights(settings.adapter_slice()) as weights, open_directory(settings.adapter_slice()) as directory:
        services, loader = _build_services(settings, parts, text, weights, sources, KeyTable(directory), traces)
        with closing(loader):
            await _run(services, settings, listener, stop, tls)
    _log.info("stopped")
    return 0


def _built_on_a_thread_of_its_own(settings: Settings) -> ModelParts:
    """Its team of threads ends with it: see `model/threads.py`."""
    with ThreadPoolExecutor(1, "build") as thread:
        return thread.submit(
            build_model, settings.model_slice(), settings.engine_slice(), settings.max_loras, settings.adapter_memory
        ).result()


def _build_services(
    settings: Settings,
    parts: ModelParts,
    text: TextModel,
    weights: Weights,
    sources: SourceTable,
    keys: KeyTable,
    traces: RequestTraces | None,
) -> tuple[Services, Loader[HostAdapter]]:
    """Every part, joined to the next. The loader is to be closed after the engine has stopped."""
    config = settings.adapter_slice()
    admin_key = load_admin_key(settings.admin_key, settings.store)
    mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    at_hand = AdaptersAtHand()
    source = AdapterSource(weights.store, weights.disk, parts, at_hand.take)
    lifecycle = Lifecycle()
    pace = Pace(lambda: engine.is_busy and lifecycle.state is not ServerState.STARTING)  # warm-up is no one's loss
    loader = Loader(source.load, mailbox.put, config.load_threads, keep=source.keep, pace=pace, on_start=stand_aside)
    engine: Engine = build_engine(
        parts.runner,
        parts.spec,
        parts.num_blocks,
        settings.engine_slice(),
        config,
        loader.submit,
        memory=parts.memory,
    )
    client = ThreadEngineClient(engine, mailbox, QueueGate(settings.engine_slice().queue))
    trial = EngineTrial(parts.fold, parts.undo, client, asyncio.get_running_loop(), at_hand)
    base_tokens = BaseTokens(text.vocabulary())
    registry = Registry(config, parts.spec, weights.catalog, weights.store, trial, base_tokens)
    registry.sweep()
    services = Services(
        client=client,
        catalog=weights.catalog,
        registry=registry,
        staging=Staging(sources, registry.new_folder, settings.max_upload_size),
        text=text,
        spec=parts.spec,
        config=settings.server_slice(),
        adapter_config=config,
        authenticator=Authenticator(admin_key, auth_required(settings.auth, settings.host), keys),
        keys=keys,
        metrics=Metrics(settings.base_name, settings.metrics_tenants),
        store=weights.store,
        traces=traces,
        lifecycle=lifecycle,
        registry_thread=WorkerThread("registry", stand_aside),
    )
    return services, loader


async def _run(
    services: Services, settings: Settings, listener: socket.socket, stop: asyncio.Event, tls: ServerTls | None
) -> None:
    async with _listening(services, listener, tls):
        await services.client.start()
        try:
            await prepare(services, settings)
            async with await hot_adapters(services, settings):
                # What is here now stays: without this, a full collection stops every thread for 0.2 s now and then.
                gc.collect()
                gc.freeze()
                return_freed_memory()
                services.lifecycle.ready()
                scheme, address = "https" if tls else "http", listener.getsockname()[:2]
                _log.info("ready: %s://%s:%d (base model `%s`)", scheme, *address, services.base_name)
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
async def _listening(services: Services, listener: socket.socket, tls: ServerTls | None) -> AsyncIterator[None]:
    """HTTP, for as long as the block lasts."""
    app = build_app(services)
    runner = HttpRunner(app, shutdown_timeout=5.0)
    await runner.setup()
    try:
        site = GuardedSite(runner, listener, app[CONNECTIONS], ssl_context=tls.context if tls else None, backlog=1024)
        await site.start()
        yield
    finally:
        await runner.cleanup()


@contextmanager
def _without_collections() -> Iterator[None]:
    """What is built here stays, so looking for garbage among it again and again is a loss of time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def _on_signals(stop: asyncio.Event, tls: ServerTls | None) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once; SIGHUP is for a renewed certificate."""

    def handle() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    if tls is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tls.reload)
