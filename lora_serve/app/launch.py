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
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from lora_serve.adapters.sources.table import build_sources
from lora_serve.adapters.storage import open_storage
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.app.listening import listening, url_of
from lora_serve.app.services import build_services
from lora_serve.app.shutdown import ENDING_SECONDS, EXIT_SECONDS, drain, end_within, give_up, on_signals
from lora_serve.app.tracing import opened_traces
from lora_serve.app.warm_up import Preparation
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import engine_host_module
from lora_serve.engine_host.hosts.base import EngineHost, LoadedEngine
from lora_serve.engine_host.supervisor import Restarts, Supervisor, load_patiently
from lora_serve.logs import configure_logging
from lora_serve.logs.handler import LogHandler
from lora_serve.logs.redaction import redaction_for
from lora_serve.logs.streams import divert_streams
from lora_serve.model.system.process import return_freed_memory
from lora_serve.server.operation.metrics import names_note
from lora_serve.server.services import Services
from lora_serve.server.sockets.client_faults import on_loop_error
from lora_serve.server.sockets.listener import bound_socket, check_exposure, warn_of_exposure
from lora_serve.server.sockets.tls import ServerTls
from lora_serve.server.telemetry.metrics import LogFigures, LogMetrics
from lora_serve.server.telemetry.tracing import RequestTraces
from lora_serve.tenancy.accounting import open_accounting
from lora_serve.tenancy.authentication.authenticator import KeyTable, auth_required
from lora_serve.tenancy.directory.opening import open_directory
from lora_serve.tenancy.lost_directory import warn_if_lost
from lora_serve.text.tokenizer import TextModel

_log = logging.getLogger(__name__)


def serve(settings: Settings, notes: Sequence[str] = ()) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit code, 0 or CUT. `notes` come first in the log.

    Raises ConfigError and ModelError; the server has not listened then.
    """
    _restrict_process()
    log = LogHandler(divert_streams())
    configure_logging(settings.log_format, redaction=redaction_for(settings), handler=log)
    for note in notes:
        _log.info("%s", note)
    tls = None if (config := settings.tls_slice()) is None else ServerTls(config)
    with (
        bound_socket(settings.host, settings.port) as listener,
        opened_traces(settings.otlp_traces_endpoint) as traces,
    ):
        check_exposure(settings.server_slice(), listener)
        warn_of_exposure(settings.server_slice(), listener)
        drained = functools.partial(end_within, ENDING_SECONDS)
        code = asyncio.run(run_server(settings, listener, tls=tls, traces=traces, drained=drained, log=log))
    _log.info("stopped")
    end_within(EXIT_SECONDS, code)
    return code


def _restrict_process() -> None:
    """Files are readable by this user only, and a crash leaves no core dump, which would hold keys, on disk."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


async def run_server(
    settings: Settings,
    listener: socket.socket,
    *,
    tls: ServerTls | None = None,
    traces: RequestTraces | None = None,
    drained: Callable[[int], None] = lambda code: None,
    log: LogFigures | None = None,
) -> int:
    """Opens the stores, runs the server and closes them; returns the exit code, 0 or CUT.

    `drained` is called with the exit code once no request is waited for any more. Raises ConfigError and ModelError.
    """
    # The GIL is given up ten times sooner than by default: beside loads without a rest, 99 of 100 small steps of 200
    # operators then took up to 118 ms instead of 524 (the median 70 either way; 2 busy cores).
    sys.setswitchinterval(0.0005)
    module = engine_host_module(settings.engine)
    module.use_one_core()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(8, "asyncio", initializer=module.use_one_core))
    loop.set_exception_handler(on_loop_error)
    stop = asyncio.Event()
    on_signals(stop, tls)
    config = settings.adapter_slice()
    sources = build_sources(config)
    restarts = Restarts(settings.engine_max_restarts)
    with (
        closing(StoreMonitor(settings.store)) as monitor,
        open_storage(config, monitor) as storage,
        open_directory(config, monitor) as directory,
    ):
        opening = open_accounting(config, settings.accounting_slice(), monitor, storage.catalog.replica)
        async with opening as accounting, module.open_host(settings, storage) as host:
            if auth_required(settings.auth_mode, settings.host):
                await warn_if_lost(directory, accounting.audit, accounting.meter)
            text = TextModel.load(settings.model, settings.allow_control_tokens, settings.chat_template)
            model = await _unless_stopped(load_patiently(host, restarts), stop)
            gc.freeze()
            if model is None:
                drained(0)
                return 0
            services = build_services(
                settings,
                model=model,
                text=text,
                storage=storage,
                sources=sources,
                keys=KeyTable(directory),
                accounting=accounting,
                traces=traces,
                use_one_core=module.use_one_core,
                monitor=monitor,
            )
            if log is not None:
                services.metrics.registry.register(LogMetrics(log))
            count = services.metrics.engine_restarts.inc
            supervisor = Supervisor(host, services.lifecycle, restarts, settings.engine_step_timeout, count)
            return await _run(services, settings, host, supervisor, listener, stop, tls, drained)


async def _unless_stopped(work: Coroutine[Any, Any, LoadedEngine], stop: asyncio.Event) -> LoadedEngine | None:
    """Returns the work's result; None if the server was told to stop before that."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


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
        _log.info("ready: %s (base model `%s`)", url_of(listener, tls), services.base_name)

    if note := names_note(services):
        _log.info("%s", note)
    async with listening(services, listener, tls):
        life = asyncio.ensure_future(supervisor.run(services.client.start, preparation.run, ready))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                await give_up(services.lifecycle, life.result(), stopped)
            code = await drain(services.lifecycle, settings.shutdown_timeout)
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
            await asyncio.to_thread(services.grammars.close)
            await asyncio.to_thread(services.templates.close)
