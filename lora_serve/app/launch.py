"""Start and stop order: with `serving.py` the only place that knows every concrete class.

Up: log, port, stores, engine and model, HTTP (health answers, /ready says 503), warm-up, pinned adapters, ready.
Down: /ready says 503, running requests end, HTTP closes, the engine stops, the loader's threads end.
A lost engine: /ready says 503, it is started and warmed up again; lost for good: /health says 503, the process ends.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lora_serve.adapters.sources.table import build_sources
from lora_serve.adapters.storage import open_storage
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.app.shutdown import ENDING_SECONDS, EXIT_SECONDS, end_within, on_signals
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.errors import ConfigError, how_to_install
from lora_serve.core.process import PatientThreads
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.core.setting_types import MAX_DRAFT
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import engine_host_module
from lora_serve.engine_host.supervisor import Restarts, load_patiently
from lora_serve.logs import configure_logging
from lora_serve.logs.handler import LogHandler
from lora_serve.logs.pipeline import redaction_for
from lora_serve.logs.writer import divert_streams
from lora_serve.server.sockets.listener import ServerTls, bound_socket, check_exposure, on_loop_error, warn_of_exposure
from lora_serve.server.telemetry.tracing import RequestTraces
from lora_serve.tenancy.accounting import open_accounting, warn_if_lost
from lora_serve.tenancy.authenticator import KeyTable, auth_required
from lora_serve.tenancy.directory import open_directory
from lora_serve.text.tokenizer import TextModel

if TYPE_CHECKING:
    from lora_serve.server.telemetry.metrics import LogFigures
    from lora_serve.server.telemetry.tracing import RequestTraces


T = TypeVar("T")
_log = logging.getLogger(__name__)


def serve(settings: Settings, notes: Sequence[str] = ()) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit code, 0 or CUT. `notes` come first in the log.

    Raises ConfigError and ModelError; the server was never ready then.
    """
    _restrict_process()
    log = LogHandler(divert_streams())
    configure_logging(settings.log_format, redaction=redaction_for(settings), handler=log)
    for note in notes:
        _log.info("%s", note)
    config = settings.part(ServerConfig)
    tls = None if config.ssl_certfile is None else ServerTls(config)
    with (
        bound_socket(settings.host, settings.port) as listener,
        opened_traces(settings.otlp_traces_endpoint) as traces,
    ):
        check_exposure(config, listener)
        warn_of_exposure(config, listener)
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
    loop.set_default_executor(PatientThreads(8, "asyncio", initializer=module.use_one_core))
    loop.set_exception_handler(on_loop_error)
    stop = asyncio.Event()
    on_signals(stop, tls)
    config = settings.part(AdapterConfig)
    sources = build_sources(config)
    load_text = functools.cache(
        lambda: TextModel.load(settings.model, settings.allow_control_tokens, settings.chat_template)
    )
    restarts = Restarts(settings.engine_max_restarts)
    with (
        closing(StoreMonitor(settings.store)) as monitor,
        open_storage(config, monitor) as storage,
        open_directory(config, monitor) as directory,
    ):
        opening = open_accounting(config, settings.part(AccountingConfig), monitor, storage.catalog.replica)
        async with opening as accounting, AsyncExitStack() as stack:
            began = time.monotonic()
            opened = stack.enter_async_context(module.open_host(settings, storage, load_text))
            if (host := await _unless_stopped(opened, stop)) is None:
                drained(0)
                return 0
            if auth_required(settings.auth_mode, settings.host):
                await warn_if_lost(directory, accounting.audit, accounting.meter)
            text = load_text()
            model, serving = await asyncio.gather(
                _unless_stopped(load_patiently(host, restarts), stop),
                asyncio.to_thread(importlib.import_module, "lora_serve.app.serving"),
            )
            load_seconds = time.monotonic() - began
            gc.freeze()
            if model is None:
                drained(0)
                return 0
            if model.spec.pooling is None:
                _log.info("%s", speculation_note(settings.speculate))
            services = serving.build_services(
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
            code: int = await serving.run(
                services, settings, host, restarts, load_seconds, listener, stop, tls, drained, log
            )
            return code


def speculation_note(setting: str) -> str:
    """A line for the log: whether tokens are guessed, how many, and how that is changed."""
    if setting == "auto":
        return f"speculation: auto, up to {MAX_DRAFT} tokens a row and step (--speculate off: none)"
    if setting == "off":
        return "speculation: off (--speculate auto: as many tokens as pay)"
    return f"speculation: up to {setting} tokens a row and step (--speculate auto: as many as pay)"


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Returns the work's result; None if the server is to stop before that."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@contextmanager
def opened_traces(endpoint: str | None) -> Iterator[RequestTraces | None]:
    """The traces for as long as the block lasts; None without an endpoint. Raises ConfigError without the extra."""
    if endpoint is None:
        yield None
        return
    try:
        from lora_serve.app.otel import OtelTraces, exporter_for
    except ImportError:
        words = "--otlp-traces-endpoint: needs OpenTelemetry, which is not installed"
        raise ConfigError(f"{words}: {how_to_install('otel')}") from None
    with closing(OtelTraces(exporter_for(endpoint))) as traces:
        yield traces
