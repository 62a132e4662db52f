"""The engine in a thread of this process: the default on CPU and in tests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from lora_serve.client.streams import EventStreams
from lora_serve.core.errors import EngineLostError, LoraServeError, NotReadyError
from lora_serve.core.messages import AdapterCommand, Event, SmokeTestResult, StepEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop
from lora_serve.engine.messages import Abort, Command, Message, Outcome, Ping, StatsQuery, Stop, Submit
from lora_serve.engine.queue_gate import QueueGate

R = TypeVar("R")
_log = logging.getLogger(__name__)
STOP_SECONDS = 20.0  # that the thread may take to end its step


class ThreadEngineClient:
    """See `EngineClient`. The mailbox is shared with the adapter loader, which posts into it."""

    def __init__(
        self,
        engine: Engine,
        mailbox: queue.SimpleQueue[Message],
        gate: QueueGate,
        rebuild: Callable[[], Engine] | None = None,
    ) -> None:
        """`rebuild`: see `EngineLoop`."""
        self.gate = gate
        self._engine = engine
        self._mailbox = mailbox
        self._rebuild = rebuild
        self._streams = EventStreams()
        self._asked: set[asyncio.Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Start the engine's thread; once."""
        assert self._thread is None, "two threads would share one engine"
        loop = asyncio.get_running_loop()

        def emit(events: Sequence[StepEvent]) -> None:
            loop.call_soon_threadsafe(self._deliver, events)

        engine_loop = EngineLoop(self._engine, self._mailbox, emit, self._rebuild)

        def run() -> None:
            try:
                engine_loop.run()
            except BaseException:
                _log.critical("the engine's thread ended", exc_info=True)
            finally:
                loop.call_soon_threadsafe(self._lose)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """See `EngineClient.infer`."""
        return self._streams.events(self.gate, request, self._submit, self._abort)

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """See `EngineClient.adapters`."""

        def message(reply: Callable[[Outcome], None]) -> Command:
            return Command(command, reply)

        outcome = await self._ask(message)
        if isinstance(outcome, LoraServeError):
            raise outcome
        return outcome

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        return await self._ask(StatsQuery)

    async def ping(self) -> None:
        """Returns between two steps."""

        def message(reply: Callable[[None], None]) -> Ping:
            return Ping(lambda: reply(None))

        await self._ask(message)

    async def lost(self) -> None:
        """Returns once the thread has ended, by itself or by `stop`."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End the thread after its current step; requests that still run get NotReadyError."""
        if self._thread is not None:
            self._mailbox.put(Stop())
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
            self._thread = None

    async def _ask(self, message: Callable[[Callable[[R], None]], Message]) -> R:
        """Put a message with a reply into the mailbox and wait for the reply."""
        self._check_running()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def reply(value: R) -> None:
            loop.call_soon_threadsafe(_resolve, answer, value)

        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._mailbox.put(message(reply))
        return await answer

    def _submit(self, request: InferenceRequest) -> None:
        self._check_running()
        self._mailbox.put(Submit(request))

    def _abort(self, request_id: str) -> None:
        self._mailbox.put(Abort(request_id))

    def _check_running(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise NotReadyError("The engine is not running.", retry_after=5)

    def _deliver(self, events: Sequence[StepEvent]) -> None:
        self._streams.deliver(self.gate, events)

    def _lose(self) -> None:
        """The thread has ended; whoever it left without an answer gets an error."""
        self._ended.set()
        num_lost = self._streams.fail_all(_lost) if self._thread is not None else 0
        for answer in list(self._asked):
            if not answer.done():
                answer.set_exception(_lost())
        if num_lost:
            _log.error("%d requests ended with the engine's thread", num_lost)


def _lost() -> EngineLostError:
    return EngineLostError("The engine stopped; try again.", retry_after=5)


def _resolve(answer: asyncio.Future[R], value: R) -> None:
    if not answer.done():
        answer.set_result(value)
