"""The engine's thread: drain the mailbox, step, hand the events over. The only caller of `Engine`."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.errors import InternalError, LoraServeError, NotReadyError
from lora_serve.core.messages import AdapterCommand, ErrorEvent, Event, Evict, StepEvent, Unpin
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.engine import Engine
from lora_serve.engine.messages import Abort, Command, Message, Outcome, Ping, StatsQuery, Stop, Submit

_log = logging.getLogger(__name__)
FAILURE = "The engine failed; the request was ended."


class EngineLoop:
    """Runs until `Stop`. `emit` gets one list of events per step, on this thread.

    It outlives its own bugs: whatever the engine raises ends every request with an error, and the engine's tables are
    built anew, as nothing in the old ones can be trusted any more. The weights stay where they are.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: queue.SimpleQueue[Message],
        emit: Callable[[Sequence[StepEvent]], None],
        rebuild: Callable[[], Engine] | None = None,
    ) -> None:
        """`rebuild`: another engine over the same runner and loader, its tables empty; None: the old one goes on."""
        self._engine = engine
        self._mailbox = mailbox
        self._emit = emit
        self._rebuild = rebuild
        self._orders = DesiredState(engine.residency.slots.num_slots)
        self._is_stopping = False

    def run(self) -> None:
        """The thread's main function."""
        is_busy = False
        while not self._is_stopping:
            events = self._messages(is_busy)
            is_busy, new = self._step()
            events += new
            if events:
                self._emit(events)
        goodbye = NotReadyError("The server is shutting down.")
        self._engine.end_commands(goodbye)
        self._emit(self._engine.scheduler.fail_all(goodbye))

    def _messages(self, is_busy: bool) -> list[StepEvent]:
        try:
            return self._drain(is_busy)
        except BaseException:  # SystemExit too: nobody would notice that this thread is gone
            _log.exception("the mailbox could not be read")
            return self._recover()

    def _step(self) -> tuple[bool, list[StepEvent]]:
        """A step that survives a bug: then all requests end with an error and the loop goes on."""
        try:
            return self._engine.step()
        except BaseException:
            _log.exception("the step failed")
            return False, self._recover()

    def _drain(self, is_busy: bool) -> list[StepEvent]:
        """Handle every message there is; with nothing to run, wait for one or for the next deadline."""
        events: list[StepEvent] = []
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

    def _take(self, message: Message) -> list[StepEvent]:
        """Handle one message; a bug in that ends all requests, and the loop goes on."""
        try:
            return [*self._handle(message)]
        except BaseException:
            _log.exception("a %s could not be handled", type(message).__name__)
        events = self._recover()
        error = InternalError(FAILURE)
        if isinstance(message, Submit) and message.request.request_id not in {event.request_id for event in events}:
            events.append(ErrorEvent(message.request.request_id, error))
        if isinstance(message, Command):
            message.reply(error)
        return events

    def _handle(self, message: Message) -> list[Event]:
        match message:
            case Submit(request):
                self._orders.use(request.refs)
                return self._engine.scheduler.add(request)
            case Abort(request_id):
                self._engine.scheduler.abort(request_id)
            case LoadFinished():
                return self._engine.load_finished(message)
            case Command():
                self._engine.command(self._noted(message))
            case StatsQuery(reply):
                reply(self._engine.stats())
            case Ping(answer):
                answer()
            case Stop():
                self._is_stopping = True
        return []

    # -- after a bug -------------------------------------------------------------------------------------------

    def _recover(self) -> list[StepEvent]:
        """Every request ends, every command is answered, and the tables are empty.

        What was to leave has left with them: it is not among those that are fetched again.
        """
        error = InternalError(FAILURE)
        if self._rebuild is None:
            return [*self._engine.scheduler.fail_all(error)]
        old = self._engine
        request_ids = old.scheduler.request_ids
        leaving = old.end_commands(error, but=(Evict, Unpin))
        old.clear_slots()
        self._engine = self._rebuild()
        self._repeat(self._orders.limits())
        for command in leaving:
            self._engine.command(command)
        self._repeat(self._orders.residents())
        _log.warning("the engine's tables were built anew; %d requests ended", len(request_ids))
        return [ErrorEvent(request_id, error) for request_id in request_ids]

    def _repeat(self, orders: Iterable[AdapterCommand]) -> None:
        for order in orders:
            self._engine.command(self._noted(Command(order, _say_if_refused)))

    def _noted(self, message: Command) -> Command:
        """The same command; once it is done, it is among the standing orders."""

        def reply(outcome: Outcome) -> None:
            if not isinstance(outcome, LoraServeError):
                self._orders.note(message.command)
            message.reply(outcome)

        return Command(message.command, reply)


def _say_if_refused(outcome: Outcome) -> None:
    if isinstance(outcome, LoraServeError):
        _log.warning("an order could not be repeated: %s", outcome)
