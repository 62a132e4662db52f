"""The server beside its engine, on the bound port, until it is told to stop. Imported while the model loads."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lora_serve.app.services import build_services
from lora_serve.app.shutdown import drain, give_up
from lora_serve.app.warm_up import Preparation
from lora_serve.core.running_servers import noted_server
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import EngineHost
from lora_serve.engine_host.supervisor import Restarts, Supervisor, load_timeout
from lora_serve.model.system.process import return_freed_memory
from lora_serve.server.app import build_app
from lora_serve.server.console import is_on
from lora_serve.server.operation.metrics import names_note
from lora_serve.server.services import Services
from lora_serve.server.sockets.connections import CONNECTIONS, GuardedSite
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.listener import ServerTls
from lora_serve.server.telemetry.metrics import LogFigures, LogMetrics

__all__ = ["build_services", "run"]
_log = logging.getLogger(__name__)


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
