"""Start and stop order: the only place that knows every concrete class.

Up: log, port, stores, engine and model, HTTP (health answers, /ready says 503), warm-up, pinned adapters, ready.
Down: /ready says 503, running requests end, HTTP closes, the engine stops, the loader's threads end.
A lost engine: /ready says 503, it is started and warmed up again; lost for good: /health says 503, the process ends.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from typing import Any

from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.registration.registry import Registry
from lora_serve.adapters.sources.table import SourceTable, build_sources
from lora_serve.adapters.storage import AdapterStorage, open_storage
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.app.shutdown import ENDING_SECONDS, EXIT_SECONDS, end_within
from lora_serve.app.tracing import opened_traces
from lora_serve.app.warm_up import Preparation
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.engine_host.base import EngineHost, HostedModel, host_module
from lora_serve.engine_host.restarts import Restarts
from lora_serve.engine_host.supervisor import Supervisor, load_patiently
from lora_serve.logs import configure_logging
from lora_serve.logs.handler import LogHandler, flush_log
from lora_serve.logs.redaction import redaction_for
from lora_serve.logs.streams import divert_streams
from lora_serve.model.system.allocator import return_freed_memory
from lora_serve.server.app import build_app
from lora_serve.server.background.fair_threads import FairThreads
from lora_serve.server.background.staging import Staging
from lora_serve.server.lifecycle import Lifecycle
from lora_serve.server.services import Services
from lora_serve.server.sockets.client_faults import on_loop_error
from lora_serve.server.sockets.connections import CONNECTIONS, GuardedSite
from lora_serve.server.sockets.exposure import check_exposure
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.listener import Listener
from lora_serve.server.sockets.tls import ServerTls
from lora_serve.server.telemetry.log_metrics import LogFigures, LogMetrics
from lora_serve.server.telemetry.metrics import Metrics
from lora_serve.server.telemetry.request_traces import RequestTraces
from lora_serve.tenancy.accounting import Accounting, open_accounting
from lora_serve.tenancy.authentication.admin_key import load_admin_key
from lora_serve.tenancy.authentication.authenticator import Authenticator, auth_required
from lora_serve.tenancy.authentication.key_table import KeyTable
from lora_serve.tenancy.directory.opening import open_directory
from lora_serve.tenancy.lost_directory import warn_if_lost
from lora_serve.text.tokenizer import TextModel

GAVE_UP = 3  # exit code: the engine was lost for good
CUT = 4  # exit code: told to stop, and requests still ran when --shutdown-timeout was over
FAILED_SECONDS = 5.0  # during which /health answers 503 before the process ends
_log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit code, 0 or CUT.

    Raises ConfigError and ModelError; the server has not listened then.
    """
    _restrict_process()
    log = LogHandler(divert_streams())
    configure_logging(settings.log_format, redaction=redaction_for(settings), handler=log)
    tls = None if (config := settings.tls_slice()) is None else ServerTls(config)
    with (
        _bound_socket(settings.host, settings.port) as listener,
        opened_traces(settings.otlp_traces_endpoint) as traces,
    ):
        check_exposure(settings.server_slice(), listener)
        code = asyncio.run(_serve(settings, listener, tls, traces, functools.partial(end_within, ENDING_SECONDS), log))
    end_within(EXIT_SECONDS, code)
    return code


def _restrict_process() -> None:
    """Files are readable by this user only, and a crash leaves no core dump, which would hold keys, on disk."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


async def _serve(
    settings: Settings,
    listener: socket.socket,
    tls: ServerTls | None,
    traces: RequestTraces | None,
    drained: Callable[[int], None] | None = None,
    log: LogFigures | None = None,
) -> int:
    """Runs from open stores to closed ones. `drained` is called with the exit code once no request is waited for."""
    drained = drained or (lambda code: None)
    # The GIL is given up ten times sooner than by default: beside loads without a rest, 99 of 100 small steps of 200
    # operators then took up to 118 ms instead of 524 (the median 70 either way; 2 busy cores).
    sys.setswitchinterval(0.0005)
    module = host_module(settings.engine)
    module.use_one_core()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8, "asyncio", initializer=module.use_one_core))
    stop = asyncio.Event()
    _on_signals(stop, tls)
    asyncio.get_running_loop().set_exception_handler(on_loop_error)
    sources = build_sources(settings.adapter_slice())
    restarts = Restarts(settings.engine_max_restarts)
    config, code = settings.adapter_slice(), 0
    with (
        closing(StoreMonitor(settings.store)) as monitor,
        open_storage(config, monitor) as storage,
        open_directory(config, monitor) as directory,
    ):
        books = open_accounting(config, settings.accounting_slice(), monitor, storage.catalog.replica)
        async with books as opened, module.open_host(settings, storage) as host:
            if auth_required(settings.auth, settings.host):
                await warn_if_lost(directory, opened.audit, opened.meter)
            text = TextModel.load(settings.model, settings.allow_control_tokens)
            model = await _unless_stopped(load_patiently(host, restarts), stop)
            gc.freeze()
            if model is None:
                drained(code)
            else:
                services = _build_services(
                    settings, model, text, storage, sources, KeyTable(directory), opened, traces, module.use_one_core,
                    monitor,
                )  # fmt: skip
                if log is not None:
                    services.metrics.registry.register(LogMetrics(log))
                count = services.metrics.engine_restarts.inc
                supervisor = Supervisor(host, services.lifecycle, restarts, settings.engine_step_timeout, count)
                code = await _run(services, settings, host, supervisor, listener, stop, tls, drained)
    _log.info("stopped")
    return code


async def _unless_stopped(work: Coroutine[Any, Any, HostedModel], stop: asyncio.Event) -> HostedModel | None:
    """Returns the work's result; None if the server was told to stop before that."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _build_services(
    settings: Settings,
    model: HostedModel,
    text: TextModel,
    storage: AdapterStorage,
    sources: SourceTable,
    keys: KeyTable,
    books: Accounting,
    traces: RequestTraces | None,
    use_one_core: Callable[[], None],
    monitor: StoreMonitor,
) -> Services:
    """Builds the parts of the web server from what is open."""
    config = settings.adapter_slice()
    admin_key = load_admin_key(settings.admin_key, settings.store, monitor)
    monitor.start()  # after everything was opened: from now on it tries again what could not be opened for writing
    base_tokens = BaseTokens(text.vocabulary())
    quota_of = keys.directory.quota_of
    registry = Registry(config, model.spec, storage.catalog, storage.store, model.verifier, base_tokens, quota_of)
    registry.sweep()
    return Services(
        client=model.client,
        catalog=storage.catalog,
        registry=registry,
        staging=Staging(sources, registry.new_folder, settings.max_upload_size),
        text=text,
        spec=model.spec,
        config=settings.server_slice(),
        adapter_config=config,
        authenticator=Authenticator(admin_key, auth_required(settings.auth, settings.host), keys),
        keys=keys,
        metrics=Metrics(settings.base_name, settings.metrics_tenants),
        store=storage.store,
        store_monitor=monitor,
        traces=traces,
        lifecycle=Lifecycle(),
        registrations=FairThreads(
            "registry",
            settings.registration_threads,
            on_start=use_one_core,
            seconds_per_minute=settings.tenant_registration_seconds,
        ),
        quotas=books.quotas,
        meter=books.meter,
        audit=books.audit,
    )


async def _run(
    services: Services,
    settings: Settings,
    host: EngineHost,
    supervisor: Supervisor,
    listener: socket.socket,
    stop: asyncio.Event,
    tls: ServerTls | None,
    drained: Callable[[int], None],
) -> int:
    """Serves until the server is told to stop; returns the exit code.

    An engine that cannot be started again ends the process here, with GAVE_UP.
    """
    preparation = Preparation(services, settings)

    def ready() -> None:
        # Objects of the start stay for good; unless frozen, a full collection over them stops every thread for 0.2 s.
        gc.collect()
        gc.freeze()
        return_freed_memory()
        host.warm_up_done()
        services.lifecycle.ready()
        scheme, address = "https" if tls else "http", listener.getsockname()[:2]
        _log.info("ready: %s://%s:%d (base model `%s`)", scheme, *address, services.base_name)

    async with _listening(services, listener, tls):
        life = asyncio.ensure_future(supervisor.run(services.client.start, preparation.run, ready))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                await _give_up(services.lifecycle, life.result(), stopped)
            code = await _drain(services.lifecycle, settings.shutdown_timeout)
            drained(code)
            return code
        finally:
            for task in (life, stopped):
                task.cancel()
            await asyncio.gather(life, stopped, return_exceptions=True)
            await preparation.close()
            services.staging.close()
            await services.background.close()
            await services.client.stop()
            await asyncio.to_thread(services.registrations.close)


async def _drain(lifecycle: Lifecycle, timeout: float) -> int:
    _log.info("draining %d requests", lifecycle.num_inside)
    if await lifecycle.drain(timeout):
        return 0
    _log.warning("%d requests did not end in time; exit code %d", lifecycle.num_inside, CUT)
    return CUT


async def _give_up(lifecycle: Lifecycle, reason: str, stopped: asyncio.Future[Any]) -> None:
    """Answers /health with 503 for FAILED_SECONDS, then ends the process without waiting for hanging threads."""
    _log.critical("the engine is lost for good: %s", reason)
    lifecycle.fail("The engine is lost; the server has to be started again.")
    await asyncio.wait({stopped}, timeout=FAILED_SECONDS)
    flush_log()
    os._exit(GAVE_UP)


@asynccontextmanager
async def _listening(services: Services, listener: socket.socket, tls: ServerTls | None) -> AsyncIterator[None]:
    """Serves HTTP for as long as the block lasts."""
    app = build_app(services)
    runner = HttpRunner(app, shutdown_timeout=5.0)
    await runner.setup()
    try:
        context = tls.context if tls else None
        await GuardedSite(runner, listener, app[CONNECTIONS], ssl_context=context, backlog=1024).start()
        yield
    finally:
        await runner.cleanup()


def _bound_socket(host: str, port: int) -> socket.socket:
    """Binds the port, before the model is loaded; connections are accepted once the site starts to listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded as a host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {reason}") from error
    return listener


def _on_signals(stop: asyncio.Event, tls: ServerTls | None) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once; SIGHUP is for a renewed certificate."""

    def handle() -> None:
        if stop.is_set():
            flush_log()
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    if tls is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tls.reload)
