"""Messages as frames on a stream socket: a length of four bytes, big-endian, then a list of messages in MessagePack;
and the connections that carry them.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from lora_serve.core.errors import InternalError, LoraServeError
from lora_serve.core.live import Message
from lora_serve.core.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 2**30
_HEAD = 4
_OS_ERROR = "OSError"
M = TypeVar("M")
CONNECT_SECONDS = 1.0  # after a cut the kernel would try again seconds later, a new attempt tries at once
TICKET_BYTES = 32


def _encode_other(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Exception):
        return _encode_error(value)
    raise TypeError(f"{type(value).__name__} cannot cross between processes")


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    if issubclass(kind, Exception):
        return _decode_error(*value)
    raise TypeError(f"{kind.__name__} cannot cross between processes")


def _encode_error(error: Exception) -> tuple[str, str, dict[str, Any]]:
    """The class's name, the message, and the fields beside the message.

    An error that is neither of the tree in `core/errors.py` nor an OSError becomes an InternalError without details.
    """
    if isinstance(error, LoraServeError):
        return type(error).__name__, str(error), vars(error)
    if isinstance(error, OSError):
        return _OS_ERROR, error.strerror or "input/output error", {"errno": error.errno or 0}
    return InternalError.__name__, "The engine met an error of its own.", {}


def _decode_error(name: str, message: str, fields: dict[str, Any]) -> LoraServeError | OSError:
    """The same error, made anew. Raises TypeError for what no error was."""
    if not isinstance(name, str) or not isinstance(message, str) or not isinstance(fields, dict):
        raise TypeError("no error has this form")
    if name == _OS_ERROR:
        return OSError(fields.get("errno", 0), message)
    kind = _errors_by_name().get(name, InternalError)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    vars(error).update({key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
    return error


def _errors_by_name() -> dict[str, type[LoraServeError]]:
    found: dict[str, type[LoraServeError]] = {}
    left: list[type[LoraServeError]] = [LoraServeError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_to_engine: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=_decode_other)
_from_engine: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(
    list[FromEngine], dec_hook=_decode_other
)


def frame_of(messages: Sequence[Message]) -> bytes:
    """The messages as one frame."""
    body = body_of(messages)
    return head_of(body) + body


def head_of(body: bytes) -> bytes:
    """The length of a body, which goes before it on a stream."""
    return len(body).to_bytes(_HEAD, "big")


def body_of(messages: Sequence[Message]) -> bytes:
    """The messages as one frame without its length, for a transport that knows where a frame ends."""
    return _encoder.encode(messages)


def to_engine(frame: bytes) -> list[ToEngine]:
    """The messages of a frame that the engine gets. Raises msgspec.DecodeError for anything else."""
    return _decoded(_to_engine, frame)


def from_engine(frame: bytes) -> list[FromEngine]:
    """The messages of a frame that the engine sent. Raises msgspec.DecodeError for anything else."""
    return _decoded(_from_engine, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets them through
        raise msgspec.DecodeError(f"no messages: {type(error).__name__}") from None


class FrameSplitter:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes, without their lengths. Raises ValueError above MAX_FRAME_BYTES."""
        self._buffer += data
        start = 0
        try:
            while (end := self._end(start)) is not None:
                yield bytes(self._buffer[start + _HEAD : end])
                start = end
        finally:
            del self._buffer[:start]

    def _end(self, start: int) -> int | None:
        """Where the frame that begins at `start` ends; None: some of it is still to come."""
        if len(self._buffer) < start + _HEAD:
            return None
        length = int.from_bytes(self._buffer[start : start + _HEAD], "big")
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        end = start + _HEAD + length
        return end if end <= len(self._buffer) else None


class FrameConnection(asyncio.Protocol):
    """Hands on every frame that is complete. Bytes that are no frames end the connection."""

    def __init__(self, receive: Callable[[bytes], None] = lambda frame: None) -> None:
        self.receive = receive
        self.resumed: Callable[[], None] = lambda: None  # called when the other end reads again
        self.closed = asyncio.Event()
        self._frames = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self.receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self.resumed()

    @property
    def can_write(self) -> bool:
        """False while the other end does not read."""
        return self._writable.is_set()

    async def drained(self) -> None:
        """Returns when the other end has read most of what was sent, or the connection is closed."""
        await self._writable.wait()

    def send(self, body: bytes) -> None:
        """Send a frame; after the end it is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(head_of(body) + body)

    def close(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Where a replica's gateways connect. The same as long as the replica lives."""

    host: str
    port: int
    ticket: bytes  # the first bytes that a gateway sends; a frame with its name follows


class FrameStream(FrameConnection):
    """The gateway's end of a connection to a replica, past Ray Serve; with TLS where Ray has it."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        super().__init__(self._waiting.put_nowait)

    @classmethod
    async def open(cls, place: ReplicaAddress, gateway: str) -> FrameStream:
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
