"""A gateway's connection to a replica, past Ray Serve: where it is, and its frames; with TLS where Ray has it."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping

import msgspec

from lora_serve.client.wire import Connection

CONNECT_SECONDS = 1.0  # after a cut the kernel would try again seconds later, a new attempt tries at once
TICKET_BYTES = 32


class Place(msgspec.Struct, frozen=True):
    """Where a replica's gateways come in. The same as long as the replica lives."""

    host: str
    port: int
    ticket: bytes  # the first bytes that a gateway sends; a frame with its name follows


def encoded(place: Place) -> bytes:
    """See `decoded`."""
    return msgspec.msgpack.encode(place)


def decoded(data: bytes) -> Place:
    """The place that was encoded. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Place)


class FrameStream(Connection):
    """The gateway's end."""

    def __init__(self) -> None:
        super().__init__(self._put)
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

    @classmethod
    async def open(cls, place: Place, gateway: str) -> FrameStream:
        """Connect under this name, which no connection before had. Raises OSError, also for one that takes too long."""
        opening = asyncio.get_running_loop().create_connection(
            cls, place.host, place.port, ssl=tls(ssl.Purpose.SERVER_AUTH)
        )
        try:
            transport, stream = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"no connection to {place.host} within {CONNECT_SECONDS:g} s") from None
        transport.write(place.ticket)
        stream.send(gateway.encode())
        return stream

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames that the replica sends, until either end is closed."""
        while (frame := await self._waiting.get()) is not None:
            yield frame

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._waiting.put_nowait(None)

    def _put(self, frame: bytes) -> None:
        self._waiting.put_nowait(frame)


def tls(purpose: ssl.Purpose, environment: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """A context by which both ends show a certificate of one authority, as on Ray's own connections; None: Ray has no
    TLS. Raises OSError, KeyError.
    """
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=environment["RAY_TLS_CA_CERT"])
    context.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
