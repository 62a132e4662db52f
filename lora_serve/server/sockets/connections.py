"""The clients' connections: their number is limited, idle ones are closed for newcomers, unread answers are broken off.

aiohttp itself closes a connection that sends no whole request head for --keep-alive-timeout. It does nothing against
thousands of connections at once, nor against an answer that is not read, which would keep its row and its memory.
asyncio does not report a TLS handshake that comes to nothing; only the task in which it accepts the newcomer ends.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lora_serve.core.setting_groups.http import ConnectionLimits
from lora_serve.server.answers import WireError, spaced
from lora_serve.server.background.tasks import running
from lora_serve.server.sockets.http_runner import HttpConnection

RESERVED_DESCRIPTORS = 256  # for stores, Redis, logs and libraries
HANDSHAKE_SECONDS = 10.0  # of TLS; asyncio's own are 60
MAX_REFUSALS = 64  # in words over TLS, at once: each takes a handshake; well below RESERVED_DESCRIPTORS
_log = logging.getLogger(__name__)
_BODY = spaced(
    WireError(
        503, "The server has as many connections as it may have; try again.", "server_error", code="overloaded"
    ).body()
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Connections:
    """The open connections. Used on the event loop's thread only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._max_open = limits.max_connections
        self._open: dict[ClientConnection, None] = {}  # the oldest first; also those in their TLS handshake
        self._refused: set[_Refusal] = set()  # that are not closed yet
        self._serving: set[asyncio.Protocol] = set()
        self._stalled: dict[ClientConnection, tuple[int, float]] = {}  # unread bytes, and since when so many
        self.num_refused = 0
        self.num_dropped = 0  # idle ones that were closed for a newcomer
        self.num_broken_off = 0  # unread answers

    def __len__(self) -> int:
        return len(self._open)

    @property
    def middleware(self) -> Middleware:
        """A middleware that notes which connections are not idle."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            protocol = request.protocol
            self._serving.add(protocol)
            try:
                return await handler(request)
            finally:
                self._serving.discard(protocol)

        return note

    def fit_descriptors(self) -> None:
        """Allow no more connections than this process may have descriptors for."""
        self._max_open = descriptors_for(self._limits.max_connections)
        if self._max_open < self._limits.max_connections:
            _log.warning(
                "--max-connections %d: this process may open files for %d (ulimit -n)",
                self._limits.max_connections,
                self._max_open,
            )

    def accept(self, server: web.Server, *, is_tls: bool = False) -> asyncio.Protocol:
        """The protocol of a new connection to aiohttp's `server`. Called by the task in which asyncio accepts it."""
        task = asyncio.current_task()
        assert task is not None, "asyncio accepts in a task, which ends after the TLS handshake"
        newcomer: ClientConnection | _Refusal
        if len(self._open) < self._max_open or self._drop_one():
            newcomer = ClientConnection(server, self._limits, self._ended, task)
            self._open[newcomer] = None
        else:
            self.num_refused += 1
            if is_tls and len(self._refused) >= MAX_REFUSALS:
                task.cancel()  # closes the socket
            newcomer = _Refusal(self._refused.discard)
            self._refused.add(newcomer)
        task.add_done_callback(lambda _: newcomer.end_unless_made())
        return newcomer

    async def watching(self, _: web.Application) -> AsyncIterator[None]:
        """Break off unread answers, for as long as the application runs."""
        async with running(self._watch, name="watching connections"):
            yield

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, min(1.0, self._limits.write_timeout / 4)))
            self._break_off_stalled(asyncio.get_running_loop().time())

    def _break_off_stalled(self, now: float) -> None:
        """A connection whose buffer does not get emptier for too long is given up, with its row."""
        before, self._stalled = self._stalled, {}
        for connection in list(self._open):
            num_bytes = connection.num_unread
            if num_bytes == 0:
                continue
            size, since = before.get(connection, (num_bytes, now))
            since = since if num_bytes == size else now
            if now - since < self._limits.write_timeout:
                self._stalled[connection] = (num_bytes, since)
                continue
            self.num_broken_off += 1
            _log.info("an answer is broken off: its reader took nothing for %.0f s", now - since)
            connection.abort()

    def _drop_one(self) -> bool:
        """Close the oldest idle connection, or one in its handshake. Returns whether there was one."""
        for connection in self._open:
            if connection not in self._serving and connection.num_unread == 0:
                self.num_dropped += 1
                connection.abort()
                self._ended(connection)
                return True
        return False

    def _ended(self, connection: ClientConnection) -> None:
        self._open.pop(connection, None)


class ClientConnection(HttpConnection):
    """A connection that tells when it ends."""

    __slots__ = ("_accepting", "_on_end", "_wire")

    def __init__(
        self,
        server: web.Server,
        limits: ConnectionLimits,
        on_end: Callable[[ClientConnection], None],
        accepting: asyncio.Task[object],
    ) -> None:
        """`accepting`: the task in which asyncio accepts it."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.keep_alive_timeout,
            max_line_size=limits.max_header_size,
            max_field_size=limits.max_header_size,
            lingering_time=min(10.0, limits.body_timeout),
            access_log=None,  # None is how aiohttp is told to write none
        )
        self._on_end = on_end
        self._accepting = accepting
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own before the last bytes are out

    @property
    def num_unread(self) -> int:
        """Bytes of answers that the network has not taken."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def abort(self) -> None:
        """Close it now; a handler that serves it, or a handshake, is cancelled."""
        if self._wire is None:
            self._accepting.cancel()
        else:
            self._wire.abort()

    def end_unless_made(self) -> None:
        """Tell that it ends if its handshake came to nothing."""
        if self._wire is None:
            self._on_end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wire = below_tls(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
        self._on_end(self)
        super().connection_lost(exc)


class GuardedSite(web.SockSite):
    """Listens on a socket and asks `connections` about every newcomer."""

    def __init__(
        self,
        runner: web.BaseRunner,
        sock: socket.socket,
        connections: Connections,
        *,
        ssl_context: ssl.SSLContext | None = None,
        backlog: int = 128,
    ) -> None:
        super().__init__(runner, sock, ssl_context=ssl_context, backlog=backlog)
        assert runner.server is not None, "the runner is set up first"
        self._connections = connections
        self._make = runner.server

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._connections.fit_descriptors()
        is_tls = self._ssl_context is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._connections.accept(self._make, is_tls=is_tls),
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if is_tls else None,
        )


class _Refusal(asyncio.Protocol):
    """A connection too many: 503 whatever it was about to ask."""

    def __init__(self, on_end: Callable[[_Refusal], None]) -> None:
        self._on_end = on_end
        self._is_made = False

    def end_unless_made(self) -> None:
        """Tell that it ends if its handshake came to nothing."""
        if not self._is_made:
            self._on_end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._is_made = True
        cast(asyncio.Transport, transport).write(_REFUSAL)
        cast(asyncio.Transport, transport).close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._on_end(self)


def below_tls(transport: asyncio.Transport) -> asyncio.Transport:
    """The transport that writes to the socket. asyncio's of TLS keeps it to itself, and does not count its bytes; where
    it is not found, these stay uncounted.
    """
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return below if isinstance(below, asyncio.Transport) else transport


def descriptors_for(num_connections: int) -> int:
    """The number of connections, at most `num_connections`, that there are descriptors for. Raises the process's
    limit as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_connections
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return max(1, min(num_connections, soft - RESERVED_DESCRIPTORS))


CONNECTIONS = web.AppKey("connections", Connections)
