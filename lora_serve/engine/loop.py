"""The engine's thread: drain the mailbox, step, hand the events over. The only caller of `Engine`."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence

from lora_serve.adapters.loader import LoadFinished
from lora_serve.core.errors import InternalError, NotReadyError
from lora_serve.core.events import ErrorEvent, Event, StepEvent
from lora_serve.engine.engine import Engine
from lora_serve.engine.messages import Abort, Command, Message, StatsQuery, Stop, Submit

_log = logging.getLogger(__name__)


class EngineLoop:
    """Runs until `Stop`. `emit` gets one list of events per step, on this thread."""

    def __init__(
        self, engine: Engine, mailbox: queue.SimpleQueue[Message], emit: Callable[[Sequence[StepEvent]], None]
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._emit = emit
        self._is_stopping = False

    def run(self) -> None:
        """The thread's main function."""
        is_busy = False
        while not self._is_stopping:
            events: list[StepEvent] = [*self._drain(is_busy)]
            is_busy, new = self._step()
            events += new
            if events:
                self._emit(events)
        goodbye = NotReadyError("The server is shutting down.")
        self._engine.end_commands(goodbye)
        self._emit(self._engine.scheduler.fail_all(goodbye))

    def _step(self) -> tuple[bool, list[StepEvent]]:
        """A step that survives a bug: then all requests end with an error and the loop goes on."""
        try:
            return self._engine.step()
        except Exception:
            _log.exception("the step failed")
            return False, [*self._engine.scheduler.fail_all(InternalError("The engine failed; the request was ended."))]

    def _drain(self, is_busy: bool) -> list[Event]:
        """Handle every message there is; with nothing to run, wait for one or for the next deadline."""
        events: list[Event] = []
        try:
            if not is_busy:
                events += self._take(self._mailbox.get(timeout=self._patience()))
            while not self._is_stopping:
                events += self._take(self._mailbox.get_nowait())
        except queue.Empty:
            pass
        return events

    def _patience(self) -> float | None:
        """Seconds until something must happen even without a message."""
        now = time.monotonic()
        deadline = self._engine.scheduler.next_deadline(now)
        return None if deadline is None else max(0.0, deadline - now)

    def _take(self, message: Message) -> list[Event]:
        """Handle one message; a bug in that ends all requests, and the loop goes on."""
        try:
            return self._handle(message)
        except Exception:
            _log.exception("a %s could not be handled", type(message).__name__)
        error = InternalError("The engine failed; the request was ended.")
        events: list[Event] = list(self._engine.scheduler.fail_all(error))
        if isinstance(message, Submit) and message.request.request_id not in {event.request_id for event in events}:
            events.append(ErrorEvent(message.request.request_id, error))
        if isinstance(message, Command):
            message.reply(error)
        return events

    def _handle(self, message: Message) -> list[Event]:
        match message:
            case Submit(request):
                return self._engine.scheduler.add(request)
            case Abort(request_id):
                self._engine.scheduler.abort(request_id)
            case LoadFinished():
                return self._engine.load_finished(message)
            case Command():
                self._engine.command(message)
            case StatsQuery(reply):
                reply(self._engine.stats())
            case Stop():
                self._is_stopping = True
        return []
