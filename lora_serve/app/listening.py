"""The port: bound before the model is loaded, listened on once the server can answer /health."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_serve.core.errors import ConfigError
from lora_serve.server.app import build_app
from lora_serve.server.services import Services
from lora_serve.server.sockets.connections import CONNECTIONS, GuardedSite
from lora_serve.server.sockets.http_runner import HttpRunner
from lora_serve.server.sockets.listener import Listener
from lora_serve.server.sockets.tls import ServerTls


def bound_socket(host: str, port: int) -> socket.socket:
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


@asynccontextmanager
async def listening(services: Services, listener: socket.socket, tls: ServerTls | None) -> AsyncIterator[None]:
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
