"""The port of a replica on which its gateways' frames come and go, past Ray Serve, which tells them of it."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol

from lora_serve.client.connection import Connection
from lora_serve.client.ray.stream import TICKET_BYTES, Place
from lora_serve.engine_host.fleet.gateways import Way

ARRIVAL_SECONDS = 10.0  # until a stranger is thrown out


class Host(Protocol):
    """The part of a replica that speaks to gateways: `ReplicaEngine`."""

    def attach(self, gateway: str, way: Way) -> None: ...
    def take(self, gateway: str, frame: bytes) -> None: ...
    def flush(self, gateway: str) -> None: ...
    def detach(self, gateway: str) -> None: ...


class Entrance:
    """On the event loop."""

    def __init__(self, address: str, host: Host) -> None:
        self._address, self._host = address, host
        self._server: asyncio.Server | None = None
        self._ticket = secrets.token_bytes(TICKET_BYTES)
        self._inside: dict[str, Connection] = {}  # by gateway
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Listen on the address alone. Raises OSError."""
        loop = asyncio.get_running_loop()
        patience = None if tls is None else ARRIVAL_SECONDS
        self._server = await loop.create_server(
            lambda: _Arrival(self._ticket, self._admit, self._leave),
            self._address,
            0,
            ssl=tls,
            ssl_handshake_timeout=patience,
        )

    @property
    def place(self) -> Place:
        """The address and the ticket, which gateways are told, and nobody else."""
        assert self._server is not None, "not open"
        return Place(self._address, self._server.sockets[0].getsockname()[1], self._ticket)

    def close(self) -> None:
        """Listen no more; whoever is there stays."""
        if self._server is not None:
            self._server.close()

    async def emptied(self) -> None:
        """Returns when no gateway is there."""
        await self._is_empty.wait()

    def _admit(self, gateway: str, connection: Connection) -> None:
        if gateway in self._inside:
            connection.close()
            return
        self._inside[gateway] = connection
        self._is_empty.clear()
        connection.receive = partial(self._host.take, gateway)
        connection.resumed = partial(self._host.flush, gateway)
        self._host.attach(gateway, connection)

    def _leave(self, gateway: str, connection: Connection) -> None:
        if self._inside.get(gateway) is not connection:
            return
        del self._inside[gateway]
        if not self._inside:
            self._is_empty.set()
        self._host.detach(gateway)


class _Arrival(Connection):
    """A connection that shows the ticket before anything else, and then its name."""

    def __init__(
        self, ticket: bytes, admit: Callable[[str, Connection], None], leave: Callable[[str, Connection], None]
    ) -> None:
        super().__init__(self._named)
        self._ticket, self._admit, self._leave = ticket, admit, leave
        self._shown = b""
        self._gateway: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(ARRIVAL_SECONDS, self._throw_out)

    def data_received(self, data: bytes) -> None:
        if missing := TICKET_BYTES - len(self._shown):
            self._shown, data = self._shown + data[:missing], data[missing:]
            if len(self._shown) < TICKET_BYTES:
                return
        if hmac.compare_digest(self._shown, self._ticket):
            super().data_received(data)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._gateway is not None:
            self._leave(self._gateway, self)

    def _named(self, name: bytes) -> None:
        self._gateway = name.decode()
        self._admit(self._gateway, self)

    def _throw_out(self) -> None:
        if self._gateway is None:
            self.close()
