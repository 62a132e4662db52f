"""One replica of a fleet as its gateway is attached to it: frames here, frames there."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from msgspec.structs import replace as changed

from lora_serve.client.base import MessageClient
from lora_serve.client.wire import body_of, from_engine
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.core.messages import (
    Convert,
    EngineCall,
    FromEngine,
    Greeting,
    Ready,
    ReplyValue,
    Reported,
    Submit,
    ToEngine,
    Validate,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.process import files_id, machine_id
from lora_serve.core.stats import ReplicaReport
from lora_serve.engine.queue_gate import QueueGate


class Transport(Protocol):
    """The replicas as a gateway reaches them. On the event loop. What fails raises any exception."""

    def follow(self, listed: Callable[[Collection[str]], None]) -> None:
        """From now on `listed` is called with the names of all replicas that take requests, at each change of them."""

    def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        """The frames of a replica for a gateway, until either of them is gone. Closing it ends the gateway's requests.

        `gateway`: a name that no stream before this one had.
        """

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        """Send a replica a frame of messages; returns when another may be sent. Frames come in the order of the
        calls, if each call is made after the last one's end.
        """

    async def close(self) -> None:
        """No replica is reached any more."""


_log = logging.getLogger(__name__)
RETRY_AFTER = 1.0  # seconds
SILENT_TICKS = 5  # after which a replica counts as lost: reports come every second, and a cut network gives no error
QUIET_TICKS = 2  # of silence after which new requests go elsewhere, if they can
TICK = 1.0  # second
_WORD_TICKS = 3  # between two words to the replica
_CLOSE_SECONDS = 5.0
_GONE = {"ActorDiedError", "ActorUnavailableError", "ReplicaGoneError"}  # names: no Ray here


class ReplicaLink(MessageClient):
    """See `MessageClient`. Open from `open` until `lost` is done."""

    def __init__(
        self,
        replica: str,
        gateway: str,
        transport: Transport,
        gate: QueueGate,
        others: Callable[[ReplicaLink, FromEngine], None] = lambda link, message: None,
    ) -> None:
        """`gateway`: a name that no link before this one had. `others`: gets messages that are neither events, replies
        nor the link's own.
        """
        super().__init__(gate, f"replica {replica}")
        self.replica = replica
        self.greeting: Greeting | None = None
        self.greeted_at = 0.0  # of this process's time.monotonic()
        self.spec: ModelSpec | None = None
        self.report: ReplicaReport | None = None
        self.num_servers = 1  # that are attached to the replica
        self.clock_offset = 0.0  # seconds by which the replica's time.monotonic() is ahead of this process's
        self.staged: dict[int, Convert | Validate] = {}  # by call id, where the replica does not see the folder
        self.lost: asyncio.Task[tuple[str, int]] | None = None  # why it ended, and the number of requests it had then
        self._gateway = gateway
        self._transport = transport
        self._others = others
        self._greeted = asyncio.Event()
        self._outbox: list[ToEngine] = []
        self._has_mail = asyncio.Event()
        self._silent = 0  # ticks
        self._is_closing = False

    @property
    def is_open(self) -> bool:
        return self.lost is not None and not self.lost.done() and not self._is_closing

    @property
    def is_lost(self) -> bool:
        """True once it has ended by itself: the replica died, or cannot be reached."""
        return self.lost is not None and self.lost.done() and not self._is_closing

    @property
    def is_quiet(self) -> bool:
        """True once the replica has said nothing for longer than it should: it may be lost."""
        return self._silent >= QUIET_TICKS

    @property
    def sees_files(self) -> bool:
        """Whether paths mean the same files to the replica and to this process."""
        return self.greeting is not None and self.greeting.files == files_id()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def open(self) -> tuple[Greeting, ModelSpec]:
        """Attach to the replica. Raises EngineLostError."""
        self.lost = asyncio.create_task(self._run(), name=f"replica {self.replica}")
        greeted = asyncio.create_task(self._greeted.wait())
        try:
            either: set[asyncio.Future[Any]] = {greeted, self.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            greeted.cancel()
        if self.greeting is None or self.spec is None:
            raise EngineLostError(f"Replica {self.replica} cannot be reached ({self.lost.result()[0]}).", RETRY_AFTER)
        return self.greeting, self.spec

    async def call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """See `MessageClient.call`. A replica that does not see the folder of a registration asks for its files."""
        if self.sees_files or not isinstance(message(0), Convert | Validate):
            return await super().call(message)
        call_ids: list[int] = []

        def without_folder(call_id: int) -> EngineCall:
            asked = message(call_id)
            assert isinstance(asked, Convert | Validate)
            self.staged[call_id] = asked
            call_ids.append(call_id)
            return changed(asked, folder=None)

        try:
            return await super().call(without_folder)
        finally:
            for call_id in call_ids:
                del self.staged[call_id]

    async def close(self) -> None:
        """Detach: what still runs there is aborted."""
        self._is_closing = self.lost is None or not self.lost.done()
        if self.lost is not None:
            self.lost.cancel()
            await asyncio.wait({self.lost}, timeout=_CLOSE_SECONDS)

    def tell(self, message: ToEngine) -> None:
        """Send a message that is not answered; after the end it is lost."""
        if self.is_open:
            self._post(message)

    # ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> tuple[str, int]:
        """Reads until the stream ends; then its open requests and calls fail."""
        parts = {asyncio.create_task(part) for part in (self._read(), self._write(), self._listen())}
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            reason = next(iter(done)).result()
        except asyncio.CancelledError:
            reason = "it was left"
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts, timeout=_CLOSE_SECONDS)
            num_lost = self._fail_all(_lost)
        return reason, num_lost

    async def _read(self) -> str:
        try:
            async with aclosing(self._transport.events(self.replica, self._gateway)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    self._silent = 0
                    self._take(from_engine(frame))
        except Exception as error:
            return _why(error)
        return "its process ended, or it ended the connection"

    async def _write(self) -> str:
        """One call at a time keeps the order, and what comes meanwhile goes together in the next. Nothing goes
        before the replica is reached.
        """
        await self._greeted.wait()
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            messages, self._outbox = self._outbox, []
            try:
                await self._transport.take(self.replica, self._gateway, body_of(messages))
            except Exception as error:
                return _why(error)

    async def _listen(self) -> str:
        """Ticks are counted, not seconds: if this process was stopped for a minute, that is one."""
        for tick in itertools.count(1):
            await asyncio.sleep(TICK)
            self._silent += 1
            if self._silent >= SILENT_TICKS:
                break
            if tick % _WORD_TICKS == 0 and self.spec is not None:
                self._has_mail.set()  # an empty frame: the replica, too, leaves whom it does not hear
        return f"it said nothing for {SILENT_TICKS * TICK:g} s"

    def _send(self, message: ToEngine) -> None:
        if not self.is_open:
            raise NotReadyError("The engine is not there any more; try again.", RETRY_AFTER)
        if isinstance(message, Submit):
            message = Submit(message.request.on_clock(self.clock_offset))
        self._post(message)

    def _post(self, message: ToEngine) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in self._receive(messages):
            if isinstance(message, Reported):
                self._note(message)
            elif isinstance(message, Greeting):
                self.greeting, self.greeted_at = message, time.monotonic()
                if message.machine != machine_id():
                    self.clock_offset = message.now - self.greeted_at
            elif isinstance(message, Ready):
                self.spec = message.spec
                self._greeted.set()
            else:
                self._others(self, message)

    def _note(self, message: Reported) -> None:
        """A message takes its time, so the largest difference of the clocks is the closest to the truth."""
        if self.greeting is not None and self.greeting.machine != machine_id():
            self.clock_offset = max(self.clock_offset, message.report.made_at - time.monotonic())
        self.report, self.num_servers = message.report, message.num_servers
        self._others(self, message)


def _why(error: Exception) -> str:
    """Words about a call that failed; Ray's own of a process that is gone say no more."""
    if type(error).__name__ in _GONE:
        return "its process ended, or its machine cannot be reached"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _lost() -> EngineLostError:
    return EngineLostError("The engine stopped unexpectedly; try again.", RETRY_AFTER)


def gateway_names(base: str) -> Callable[[], str]:
    """Gives names for one process's links, each once."""
    numbers = itertools.count(1)
    return lambda: f"{base}.{next(numbers)}"
