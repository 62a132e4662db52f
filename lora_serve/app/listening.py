"""Serves HTTP on the bound port, and notes for commands on this machine where that is."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_serve.core.running_servers import noted_server
from lora_serve.server.app import build_app
from lora_serve.server.services import Services
from lora_serve.server.sockets.connections import CONNECTIONS, GuardedSite
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.tls import ServerTls


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
