"""The requests that wait for events, on the event loop's side of an engine's mailbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, StartedEvent, StepEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.queue_gate import QueueGate


class EventStreams:
    """One queue per request that was submitted and has not ended."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    async def events(
        self,
        gate: QueueGate,
        request: InferenceRequest,
        submit: Callable[[InferenceRequest], None],
        abort: Callable[[str], None],
    ) -> AsyncIterator[Event]:
        """See `EngineClient.infer`. `submit` and `abort` put a message into the mailbox.

        Raises what `submit` raises if there is no engine.
        """
        with gate.entered((request,)):
            events: asyncio.Queue[Event] = asyncio.Queue()
            self._queues[request.request_id] = events
            is_over = True  # until it is submitted
            try:
                submit(request)
                is_over = False
                while not is_over:
                    event = await events.get()
                    is_over = isinstance(event, ErrorEvent | FinishEvent)
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    yield event
            finally:
                del self._queues[request.request_id]
                if not is_over:
                    abort(request.request_id)

    def deliver(self, gate: QueueGate, events: Iterable[StepEvent]) -> None:
        """Each event to whoever still waits for it."""
        for event in events:
            if isinstance(event, StartedEvent):
                gate.start(event.request_id)
                continue
            waiting = self._queues.get(event.request_id)
            if waiting is not None:
                waiting.put_nowait(event)

    def fail_all(self, error: Callable[[], LoraServeError]) -> int:
        """End every request with an error of its own; how many there were."""
        for request_id, waiting in self._queues.items():
            waiting.put_nowait(ErrorEvent(request_id, error()))
        return len(self._queues)
