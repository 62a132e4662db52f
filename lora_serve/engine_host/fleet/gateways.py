"""The gateways that are attached to a replica: who asked for what, and a stream of frames back to each. No Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec.structs import replace

from lora_serve.client.wire import body_of, to_engine
from lora_serve.core.blob_messages import BlobMessage
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.message import Call
from lora_serve.core.messages import Abort, ErrorEvent, FinishEvent, FromEngine, Reply, RequestEvent, Submit, ToEngine

OWN = ""  # in the place of a gateway's name: the replica itself


SILENT_REPORTS = 15  # after which a gateway counts as lost: it says something for every third report
_log = logging.getLogger(__name__)


class _Outbox:
    """What waits for one gateway: all of it is its next frame."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []
        self.has_mail = asyncio.Event()
        self.silent = 0  # reports since the gateway was heard
        self.is_left = False

    def put(self, message: FromEngine) -> None:
        self.messages.append(message)
        self.has_mail.set()

    async def frame(self) -> bytes:
        await self.has_mail.wait()
        self.has_mail.clear()
        messages, self.messages = self.messages, []
        return body_of(messages)


class Gateways:
    """On the event loop, but `send`, which the engine's threads call."""

    def __init__(
        self,
        take: Callable[[ToEngine], None],
        answered: Callable[[Reply], None],
        own: Callable[[FromEngine], None] = lambda message: None,
    ) -> None:
        """`take`: gives the engine a message. `answered`: gets replies to what the engine has asked. `own`: gets the
        answers to what the replica itself asks, under the name OWN.
        """
        self._take = take
        self._answered = answered
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, _Outbox] = {}
        self._owners: dict[str, str] = {}  # gateway by request id
        self._calls: dict[int, tuple[str, int]] = {}  # gateway and its call id, by the id that the engine knows
        self._call_ids = itertools.count(1)
        self._blobs: dict[int, str] = {}  # gateway by the id of a call about its stores that it has not answered
        self._attached: tuple[str, ...] = ()

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

    async def events(self, gateway: str, greeting: Sequence[FromEngine]) -> AsyncGenerator[bytes, None]:
        """The frames for a gateway, `greeting` first. When it is closed, the gateway's requests are aborted."""
        outbox = self._outboxes[gateway] = _Outbox()
        self._attached = tuple(self._outboxes)
        try:
            yield body_of(greeting)
            while not outbox.is_left:
                yield await outbox.frame()
        finally:
            self._close(gateway)

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
        elif isinstance(message, Call):
            own = next(self._call_ids)
            self._calls[own] = gateway, message.call_id
            message = replace(message, call_id=own)
        self._take(message)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Give each gateway what is for it; called on any thread."""
        self._loop.call_soon_threadsafe(self._deliver, messages)

    def caller(self, call_id: int) -> tuple[str, int]:
        """The gateway whose call the engine knows by this id, and its own id of it; asked on any thread. Raises
        AdapterUnavailableError if it left.
        """
        try:
            return self._calls[call_id]
        except KeyError:
            raise _no_gateway() from None

    def post(self, gateway: str, message: BlobMessage) -> None:
        """Ask a gateway for something of its stores; called on any thread."""
        self._loop.call_soon_threadsafe(self._post, gateway, message)

    def report(self, message: FromEngine) -> None:
        """Give all gateways a message; leave those that were not heard for many of them."""
        for gateway, outbox in list(self._outboxes.items()):
            outbox.put(message)
            outbox.silent += 1
            if outbox.silent > SILENT_REPORTS:
                _log.warning("a gateway is lost: it said nothing for %d reports", SILENT_REPORTS)
                outbox.is_left = True
                self._close(gateway)

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
                outbox.put(message)

    def _post(self, gateway: str, message: BlobMessage) -> None:
        outbox = self._outboxes.get(gateway)
        if outbox is not None:
            if isinstance(message, Call):
                self._blobs[message.call_id] = gateway
            outbox.put(message)
        elif isinstance(message, Call):
            self._answered(Reply(message.call_id, error=_no_gateway()))

    def _close(self, gateway: str) -> None:
        """The gateway left, or it is dead: nobody waits for its requests."""
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
