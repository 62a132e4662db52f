"""The seam of seven methods between the web and the engine, and the part of every client that does not depend on where
the engine runs. Only ids, refs and events cross it; never tensors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from lora_serve.core.errors import LoraServeError, NotReadyError
from lora_serve.core.live import EngineView
from lora_serve.core.messages import (
    Abort,
    AdapterCommand,
    Command,
    EngineCall,
    ErrorEvent,
    Event,
    FinishEvent,
    FromEngine,
    GetStats,
    Ping,
    Reply,
    ReplyValue,
    RequestEvent,
    SmokeTestResult,
    StartedEvent,
    Submit,
    ToEngine,
    Watch,
)
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.queue_gate import QueueGate

_log = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine as the doors and the web see it. All methods run on the event loop's thread."""

    gate: QueueGate  # the limits of the queue: `infer` asks it, and callers that submit several requests ask it first

    @property
    def is_there(self) -> bool:
        """Whether an engine takes requests now; where it may be missing for a while, requests wait."""

    async def start(self) -> None:
        """Start the engine; returns when it takes requests (warm-up is requests)."""

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """Submit `request` at once and yield its events: PromptEvent, TokenEvent ..., then FinishEvent.

        With `pooling`: PromptEvent, PooledEvent, FinishEvent.
        An ErrorEvent is raised as its error instead of yielded. A fleet's client may say LostEvent after any of them
        and then begins again: a caller that has shown some of it raises the event's error, so that it does not.
        Leaving the loop early (`aclose`) is the abort: the engine then frees the row's blocks and slot. Submitting is
        refused by the gate: QueueFullError, TenantQueueFullError.
        """

    def answered(self, request_id: str) -> None:
        """Note that the caller has all it wants of a request: leaving `infer` early is then a stop, no abort."""

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """Run a command about an adapter; returns when it is done. A SmokeTest returns its result.

        Raises AdapterUnavailableError, InvalidAdapterError.
        """

    async def stats(self) -> EngineStats:
        """A snapshot made between two steps."""

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        """The view of each engine that answers soon: what it does, and did since the last view.

        `seen`: the mark of the last view, by replica. `tenants`, `in_full`: see `Watch`. Raises NotReadyError,
        EngineLostError if there is no engine.
        """

    async def stop(self) -> None:
        """End the engine; open requests and calls get NotReadyError."""


class MessageClient(ABC):
    """See `EngineClient`. A transport implements `_send`, and hands each message of the engine to `_receive`."""

    def __init__(self, gate: QueueGate, name: str = "the engine") -> None:
        """`name`: of the engine, in the log."""
        self.gate = gate
        self._name = name
        self._streams: dict[str, asyncio.Queue[Event]] = {}  # by request id: submitted and not ended
        self._answered: set[str] = set()  # those of them whose callers have all they want
        self._calls: dict[int, asyncio.Future[ReplyValue]] = {}
        self._call_ids = itertools.count(1)

    @property
    def is_there(self) -> bool:
        """See `EngineClient.is_there`: a request finds out by itself."""
        return True

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Give the engine a message; returns at once. Raises NotReadyError if there is no engine."""

    def infer(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """See `EngineClient.infer`."""
        return self.events_of(request, self.gate.entered((request,)))

    async def events_of(
        self, request: InferenceRequest, admission: AbstractContextManager[None]
    ) -> AsyncGenerator[Event, None]:
        """The events of a request, which waits as long as `admission` lasts."""
        with admission:
            events: asyncio.Queue[Event] = asyncio.Queue()
            self._streams[request.request_id] = events
            is_over = True  # until it is submitted
            try:
                self._send(Submit(request))
                is_over = False
                while not is_over:
                    event = await events.get()
                    is_over = isinstance(event, ErrorEvent | FinishEvent)
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    yield event
            finally:
                del self._streams[request.request_id]
                is_answered = request.request_id in self._answered
                self._answered.discard(request.request_id)
                if not is_over:
                    with suppress(NotReadyError):
                        self._send(Abort(request.request_id, is_answered))

    def answered(self, request_id: str) -> None:
        """See `EngineClient.answered`."""
        if request_id in self._streams:
            self._answered.add(request_id)

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """See `EngineClient.adapters`."""
        value = await self.call(lambda call_id: Command(call_id, command))
        return value if isinstance(value, SmokeTestResult) else None

    async def bring_to(self, commands: Iterable[AdapterCommand], timeout: float) -> None:
        """Sends the commands in this order, without waiting for them one by one; `timeout` seconds for all."""
        tasks = [asyncio.create_task(self._try(command)) for command in commands]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def _try(self, command: AdapterCommand) -> None:
        try:
            await self.adapters(command)
        except LoraServeError as error:
            _log.warning("%s refused a %s: %s", self._name, type(command).__name__, error)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        value = await self.call(GetStats)
        assert isinstance(value, EngineStats)
        return value

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        """See `EngineClient.watch`."""
        return [await self.view(seen.get("", 0), tenants, in_full=in_full)]

    async def view(self, since: int, tenants: Collection[str], *, in_full: bool) -> EngineView:
        """See `watch`; of this engine alone."""
        value = await self.call(lambda call_id: Watch(call_id, since, tuple(tenants), in_full))
        assert isinstance(value, EngineView)
        return value

    async def ping(self) -> None:
        """Returns between two steps."""
        await self.call(Ping)

    async def call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """Send the message made with a new call id and wait for its reply. Raises the error of a failed call."""
        call_id = next(self._call_ids)
        reply: asyncio.Future[ReplyValue] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        try:
            self._send(message(call_id))
            return await reply
        finally:
            del self._calls[call_id]

    def _receive(self, messages: Sequence[FromEngine]) -> list[FromEngine]:
        """Hand events and replies to open requests and calls, on the event loop. Returns all other messages."""
        others: list[FromEngine] = []
        for message in messages:
            if isinstance(message, RequestEvent):
                if isinstance(message, StartedEvent):
                    self.gate.start(message.request_id)
                elif (events := self._streams.get(message.request_id)) is not None:
                    events.put_nowait(message)
            elif isinstance(message, Reply):
                self._reply(message)
            else:
                others.append(message)
        return others

    def _reply(self, message: Reply) -> None:
        reply = self._calls.get(message.call_id)
        if reply is None or reply.done():
            return
        if message.error is None:
            reply.set_result(message.value)
        else:
            reply.set_exception(message.error)

    def _fail_all(self, error: Callable[[], LoraServeError]) -> int:
        """End every request and every call, each with an error of its own. Returns the number of requests."""
        for request_id, events in self._streams.items():
            events.put_nowait(ErrorEvent(request_id, error()))
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error())
        return len(self._streams)
