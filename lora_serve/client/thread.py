"""The engine in a thread of this process: the default on CPU and in tests."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from lora_serve.core.commands import AdapterCommand, ProbeResult
from lora_serve.core.errors import LoraServeError, NotReadyError
from lora_serve.core.events import ErrorEvent, Event, FinishEvent, StartedEvent, StepEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop
from lora_serve.engine.messages import Abort, Command, Message, Outcome, StatsQuery, Stop, Submit
from lora_serve.engine.queue_gate import QueueGate

R = TypeVar("R")


class ThreadEngineClient:
    """See `EngineClient`. The mailbox is shared with the adapter loader, which posts into it."""

    def __init__(self, engine: Engine, mailbox: queue.SimpleQueue[Message], gate: QueueGate) -> None:
        self.gate = gate
        self._engine = engine
        self._mailbox = mailbox
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the engine's thread."""
        loop = asyncio.get_running_loop()

        def emit(events: Sequence[StepEvent]) -> None:
            loop.call_soon_threadsafe(self._deliver, events)

        run = EngineLoop(self._engine, self._mailbox, emit).run
        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    async def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """See `EngineClient.infer`."""
        self._check_running()
        with self.gate.entered((request,)):
            events: asyncio.Queue[Event] = asyncio.Queue()
            self._queues[request.request_id] = events
            self._mailbox.put(Submit(request))
            is_over = False
            try:
                while not is_over:
                    event = await events.get()
                    is_over = isinstance(event, ErrorEvent | FinishEvent)
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    yield event
            finally:
                del self._queues[request.request_id]
                if not is_over:
                    self._mailbox.put(Abort(request.request_id))

    async def adapters(self, command: AdapterCommand) -> ProbeResult | None:
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

    async def stop(self) -> None:
        """End the thread after its current step; requests that still run get NotReadyError."""
        if self._thread is not None:
            self._mailbox.put(Stop())
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _ask(self, message: Callable[[Callable[[R], None]], Message]) -> R:
        """Put a message with a reply into the mailbox and wait for the reply."""
        self._check_running()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def reply(value: R) -> None:
            loop.call_soon_threadsafe(_resolve, answer, value)

        self._mailbox.put(message(reply))
        return await answer

    def _check_running(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise NotReadyError("The engine is not running.", retry_after=5)

    def _deliver(self, events: Sequence[StepEvent]) -> None:
        """On the event loop: each event to whoever still waits for it."""
        for event in events:
            if isinstance(event, StartedEvent):
                self.gate.leave(event.request_id)
                continue
            waiting = self._queues.get(event.request_id)
            if waiting is not None:
                waiting.put_nowait(event)


def _resolve(answer: asyncio.Future[R], value: R) -> None:
    if not answer.done():
        answer.set_result(value)
