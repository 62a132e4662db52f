"""The gateways that are attached to a replica: who asked for what, and a stream of frames back to each. No Ray."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from lora_serve.client.wire import TICKET_BYTES, FrameConnection, ReplicaAddress, body_of, to_engine
from lora_serve.core.blob_messages import BlobMessage
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.live import Call
from lora_serve.core.messages import Abort, ErrorEvent, FinishEvent, FromEngine, Reply, RequestEvent, Submit, ToEngine

OWN = ""  # in the place of a gateway's name: the replica itself
SILENT_REPORTS = 15  # after which a gateway counts as lost: it says something for every third report
_log = logging.getLogger(__name__)


class FrameSink(Protocol):
    """The connection that takes the frames for one gateway."""

    @property
    def can_write(self) -> bool:
        """False while the gateway does not read."""

    def send(self, body: bytes) -> None:
        """Send a frame; returns at once."""

    def close(self) -> None:
        """End the gateway's connection."""


class _Outbox:
    """What waits for one gateway: all of it is its next frame."""

    def __init__(self, sink: FrameSink) -> None:
        self.sink = sink
        self.messages: list[FromEngine] = []
        self.silent = 0  # reports since the gateway was heard
        self._is_closed = False

    def flush(self) -> None:
        """Messages of which no frame can be made end the connection, so that waiting requests fail at once. Nothing
        follows them, or an answer would have a hole.
        """
        if not self.messages or not self.sink.can_write:
            return
        messages, self.messages = self.messages, []
        if self._is_closed:
            return
        try:
            body = body_of(messages)
        except Exception:
            _log.exception("a gateway is left: it cannot be told what is for it")
            self._is_closed = True
            self.sink.close()
        else:
            self.sink.send(body)


@dataclass(eq=False)
class Gateways:
    """On the event loop, but `send`, which the engine's threads call."""

    _take: Callable[[ToEngine], None]  # gives the engine a message
    _answered: Callable[[Reply], None]  # gets replies to what the engine has asked
    _own: Callable[[FromEngine], None] = lambda message: None  # gets answers to what the replica itself asks, as OWN
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _outboxes: dict[str, _Outbox] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)  # gateway by request id
    # Gateway and its call id, by the id that the engine knows.
    _calls: dict[int, tuple[str, int]] = field(default_factory=dict)
    _call_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    # Gateway by the id of a call about its stores that it has not answered.
    _blobs: dict[int, str] = field(default_factory=dict)
    _attached: tuple[str, ...] = ()
    _mail: deque[Callable[[], None]] = field(default_factory=deque)  # from threads to the event loop
    _is_woken: bool = False

    @property
    def attached(self) -> tuple[str, ...]:
        """The gateways that are there now; asked on any thread."""
        return self._attached

    @property
    def num_attached(self) -> int:
        return len(self._outboxes)

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    def attach(self, gateway: str, sink: FrameSink, greeting: Sequence[FromEngine]) -> None:
        """From now on the gateway gets frames, `greeting` first."""
        outbox = self._outboxes[gateway] = _Outbox(sink)
        self._attached = tuple(self._outboxes)
        outbox.messages += greeting
        outbox.flush()

    def flush(self, gateway: str) -> None:
        """The gateway reads again."""
        if (outbox := self._outboxes.get(gateway)) is not None:
            outbox.flush()

    def take(self, gateway: str, frame: bytes) -> None:
        """Handle the messages of a gateway. Those of one that is not attached any more are dropped."""
        outbox = self._outboxes.get(gateway)
        if outbox is None:
            return
        outbox.silent = 0
        for message in to_engine(frame):
            if isinstance(message, Reply):
                if self._blobs.pop(message.call_id, None) is not None:
                    self._answered(message)
            else:
                self.ask(gateway, message)

    def ask(self, gateway: str, message: ToEngine) -> None:
        """Give the engine a message in the name of a gateway, or of OWN."""
        if isinstance(message, Submit):
            self._owners[message.request.request_id] = gateway
        elif isinstance(message, Abort):
            if self._owners.get(message.request_id) == gateway:  # the engine says no more of it
                del self._owners[message.request_id]
        elif isinstance(message, Call):
            own = next(self._call_ids)
            self._calls[own] = gateway, message.call_id
            message = replace(message, call_id=own)
        self._take(message)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Give each gateway what is for it; called on any thread."""
        self._hand_over(partial(self._deliver, messages))

    def caller_of(self, call_id: int) -> tuple[str, int]:
        """The gateway whose call the engine knows by this id, and its own id of it; asked on any thread. Raises
        AdapterUnavailableError if it left.
        """
        try:
            return self._calls[call_id]
        except KeyError:
            raise _no_gateway() from None

    def post(self, gateway: str, message: BlobMessage) -> None:
        """Ask a gateway for something of its stores; called on any thread."""
        self._hand_over(partial(self._post, gateway, message))

    def report(self, message: FromEngine) -> None:
        """Give all gateways a message; leave those that were not heard for many of them."""
        for gateway, outbox in list(self._outboxes.items()):
            outbox.messages.append(message)
            outbox.flush()
            outbox.silent += 1
            if outbox.silent > SILENT_REPORTS:
                _log.warning("a gateway is lost: it said nothing for %d reports", SILENT_REPORTS)
                outbox.sink.close()
                self.detach(gateway)

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Several steps that wait for the event loop wake it once, and are one frame."""
        self._mail.append(work)
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take_over)

    def _take_over(self) -> None:
        self._is_woken = False  # before the look: what comes after it wakes again
        while self._mail:
            self._mail.popleft()()
        for outbox in self._outboxes.values():
            outbox.flush()

    def _deliver(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            gateway = None
            if isinstance(message, RequestEvent):
                is_last = isinstance(message, FinishEvent | ErrorEvent)
                owner = self._owners.pop if is_last else self._owners.get
                gateway = owner(message.request_id, None)
            elif isinstance(message, Reply) and message.call_id in self._calls:
                gateway, call_id = self._calls.pop(message.call_id)
                message = replace(message, call_id=call_id)  # noqa: PLW2901
            if gateway == OWN:
                self._own(message)
            elif gateway is not None and (outbox := self._outboxes.get(gateway)) is not None:
                outbox.messages.append(message)

    def _post(self, gateway: str, message: BlobMessage) -> None:
        outbox = self._outboxes.get(gateway)
        if outbox is not None:
            if isinstance(message, Call):
                self._blobs[message.call_id] = gateway
            outbox.messages.append(message)
        elif isinstance(message, Call):
            self._answered(Reply(message.call_id, error=_no_gateway()))

    def detach(self, gateway: str) -> None:
        """The gateway left, or it is dead: its requests are aborted."""
        self._outboxes.pop(gateway, None)
        self._attached = tuple(self._outboxes)
        for request_id in [one for one, owner in self._owners.items() if owner == gateway]:
            del self._owners[request_id]
            self._take(Abort(request_id))
        for call_id in [one for one, (owner, _) in self._calls.items() if owner == gateway]:
            del self._calls[call_id]
        for call_id in [one for one, owner in self._blobs.items() if owner == gateway]:
            del self._blobs[call_id]
            self._answered(Reply(call_id, error=_no_gateway()))


def _no_gateway() -> AdapterUnavailableError:
    return AdapterUnavailableError("The server that has the adapter's files left; try again.")


ARRIVAL_SECONDS = 10.0  # until a stranger is thrown out


class Entrance:
    """The port at which gateways connect. On the event loop."""

    def __init__(self, address: str, gateways: Gateways, greeting: Callable[[], Sequence[FromEngine]]) -> None:
        """`greeting`: the first messages to a gateway."""
        self._address, self._gateways, self._greeting = address, gateways, greeting
        self._server: asyncio.Server | None = None
        self._ticket = secrets.token_bytes(TICKET_BYTES)
        self._inside: dict[str, FrameConnection] = {}  # by gateway
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
    def place(self) -> ReplicaAddress:
        """The address and the ticket, which only gateways get."""
        assert self._server is not None, "not open"
        return ReplicaAddress(self._address, self._server.sockets[0].getsockname()[1], self._ticket)

    def close(self) -> None:
        """Listen no more; connections stay."""
        if self._server is not None:
            self._server.close()

    async def emptied(self) -> None:
        """Returns when no gateway is there."""
        await self._is_empty.wait()

    def _admit(self, gateway: str, connection: FrameConnection) -> None:
        if gateway in self._inside:
            connection.close()
            return
        self._inside[gateway] = connection
        self._is_empty.clear()
        connection.receive = partial(self._gateways.take, gateway)
        connection.resumed = partial(self._gateways.flush, gateway)
        self._gateways.attach(gateway, connection, self._greeting())

    def _leave(self, gateway: str, connection: FrameConnection) -> None:
        if self._inside.get(gateway) is not connection:
            return
        del self._inside[gateway]
        if not self._inside:
            self._is_empty.set()
        self._gateways.detach(gateway)


class _Arrival(FrameConnection):
    """A connection that shows the ticket before anything else, and then its name."""

    def __init__(
        self,
        ticket: bytes,
        admit: Callable[[str, FrameConnection], None],
        leave: Callable[[str, FrameConnection], None],
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
