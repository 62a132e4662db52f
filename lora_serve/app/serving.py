"""The server beside its engine: its parts, built of what is open, on the bound port until it is told to stop. Imported
while the model loads.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.registration.registry import Registry
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.app.shutdown import drain, give_up
from lora_serve.app.warm_up import Preparation
from lora_serve.client.base import EngineClient
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.process import noted_server
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import EngineHost, LoadedEngine
from lora_serve.engine_host.supervisor import Restarts, Supervisor, load_timeout
from lora_serve.model.system.process import return_freed_memory
from lora_serve.server.app import build_app
from lora_serve.server.background.caller_texts import NUM_PROCESSES, AdapterTemplates, GrammarChecks
from lora_serve.server.background.tasks import FairThreads, Staging
from lora_serve.server.console import is_on
from lora_serve.server.lifecycle import Lifecycle
from lora_serve.server.operation.metrics import names_note
from lora_serve.server.overflow.decision import Overflow
from lora_serve.server.services import Services
from lora_serve.server.sockets.connections import CONNECTIONS, GuardedSite
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.listener import ServerTls
from lora_serve.server.telemetry.metrics import LogFigures, LogMetrics, Metrics
from lora_serve.server.telemetry.tracing import RequestTraces
from lora_serve.tenancy.accounting import Accounting
from lora_serve.tenancy.admin_key import AdminKey, load_admin_key
from lora_serve.tenancy.authenticator import Authenticator, KeyTable, auth_required
from lora_serve.text.adapter_template import TemplateProcesses, base_templates
from lora_serve.text.tokenizer import TextModel

_log = logging.getLogger(__name__)


def build_services(
    settings: Settings,
    *,
    model: LoadedEngine,
    text: TextModel,
    storage: AdapterStorage,
    sources: SourceTable,
    keys: KeyTable,
    accounting: Accounting,
    traces: RequestTraces | None,
    use_one_core: Callable[[], None],
    monitor: StoreMonitor,
) -> Services:
    """The parts of the web server, joined. Raises ConfigError for an admin key that cannot be read or made."""
    config, adapter_config = settings.part(ServerConfig), settings.part(AdapterConfig)
    admin_key = load_admin_key(settings.admin_key, settings.store, monitor)
    monitor.start()  # after everything was opened: from now on it tries again what could not be opened for writing
    base_tokens = BaseTokens(text.vocabulary(), text.eos_token_ids)
    processes = TemplateProcesses(NUM_PROCESSES)
    templates = base_templates(text, model.spec, processes, adapter_config.adapter_chat_templates)
    registry = Registry(adapter_config, model.spec, storage.catalog, storage.store, base_tokens, templates)
    registry.sweep(seconds=0)  # what must come first; the reconciler goes on once the server is ready
    metrics = Metrics(settings.base_name, settings.metrics_tenants)
    return Services(
        client=model.client,
        catalog=storage.catalog,
        registry=registry,
        verifier=model.verifier,
        staging=Staging(sources, registry.new_folder, settings.max_upload_size),
        text=text,
        grammars=GrammarChecks(text, config),
        spec=model.spec,
        config=config,
        adapter_config=adapter_config,
        authenticator=Authenticator(
            admin_key,
            auth_required(settings.auth_mode, settings.host),
            keys,
            tuple(AdminKey.of(secret) for secret in settings.api_key),
        ),
        keys=keys,
        metrics=metrics,
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
        quotas=accounting.quotas,
        meter=accounting.meter,
        overflow=overflow_of(settings.part(OverflowConfig), model.client, metrics, keys),
        audit=accounting.audit,
        templates=AdapterTemplates(processes),
    )


def overflow_of(config: OverflowConfig, client: EngineClient, metrics: Metrics, keys: KeyTable) -> Overflow | None:
    """The neighbours of --overflow; None if there are none."""
    if not config.neighbours:
        return None
    return Overflow(config, client, metrics.registry, keys.directory.may_leave)


async def run(
    services: Services,
    settings: Settings,
    host: EngineHost,
    restarts: Restarts,
    load_seconds: float,
    listener: socket.socket,
    stop: asyncio.Event,
    tls: ServerTls | None,
    drained: Callable[[int], None],
    log: LogFigures | None,
) -> int:
    """Serves until the server is told to stop; returns the exit code. `load_seconds`: that the model took to load.

    An engine that cannot be started again ends the process here, with GAVE_UP.
    """
    if log is not None:
        services.metrics.registry.register(LogMetrics(log))

    def lost(reason: str) -> None:
        services.metrics.engine_restarts.inc()
        services.history.lost(reason)

    lifecycle, step_timeout = services.lifecycle, settings.engine_step_timeout
    supervisor = Supervisor(host, lifecycle, restarts, step_timeout, lost, load_timeout(load_seconds))
    preparation = Preparation(services, settings, host.is_warm)

    def ready() -> None:
        # Objects of the start stay for good; unless frozen, a full collection over them stops every thread for 0.2 s.
        gc.collect()
        gc.freeze()
        return_freed_memory()
        host.warm_up_done()
        services.lifecycle.ready()
        services.history.ready()
        console = f"; the console: {url_of(listener, tls, reachable=True)}/ui/" if is_on(services.config) else ""
        _log.info("ready: %s (base model `%s`)%s", url_of(listener, tls), services.base_name, console)

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
            await asyncio.to_thread(services.large_bodies.close)


@asynccontextmanager
async def listening(services: Services, listener: socket.socket, tls: ServerTls | None) -> AsyncIterator[None]:
    """Serves HTTP for as long as the block lasts."""
    app = build_app(services)
    runner = HttpRunner(app, shutdown_timeout=5.0, root_path=services.config.root_path.rstrip("/"))
    await runner.setup()
    try:
        context = tls.context if tls else None
        await GuardedSite(runner, listener, app[CONNECTIONS], ssl_context=context, backlog=1024).start()
        with noted_server(url_of(listener, tls, reachable=True), services.adapter_config.store):
            yield
    finally:
        await runner.cleanup()


def url_of(listener: socket.socket, tls: ServerTls | None, *, reachable: bool = False) -> str:
    """The URL of a bound socket; with `reachable` that of loopback where it is bound to every address."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if reachable and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
