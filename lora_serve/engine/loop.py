"""The engine's thread: drain the mailbox, step, hand the messages over. The only caller of `Engine`."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.errors import InternalError, LoraServeError, NotReadyError, overload
from lora_serve.core.live import Call
from lora_serve.core.messages import (
    Abort,
    AdapterCommand,
    Command,
    ErrorEvent,
    Evict,
    FinishEvent,
    FromLoop,
    GetStats,
    Ping,
    Reply,
    Stop,
    Submit,
    ToLoop,
    Unpin,
    Watch,
)
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.engine import Engine
from lora_serve.engine.loader import LoadFinished

_log = logging.getLogger(__name__)
FAILURE = "The engine failed; the request was ended."
_NO_CALL = 0  # the id of commands that the loop gives by itself
Mail = ToLoop | LoadFinished[Any] | GrammarCompiled  # everything that can reach the loop


class EngineLoop:
    """Runs until `Stop`. `emit` gets one list of messages per step, on this thread; one more if the mail gave some.

    The loop outlives its own bugs: whatever the engine raises ends every request with an error, and the engine's tables
    are built anew, as nothing in the old ones can be trusted any more. The weights stay where they are.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: queue.SimpleQueue[Mail],
        emit: Callable[[Sequence[FromLoop]], object],
        rebuild: Callable[[], Engine] | None = None,
    ) -> None:
        """`rebuild`: another engine over the same runner and loader, its tables empty; None: the old one goes on."""
        self._engine = engine
        self._mailbox = mailbox
        self._emit = emit
        self._rebuild = rebuild
        self._desired = DesiredState(engine.residency.slots.num_slots)
        self._open: set[str] = set()  # ids of requests whose ends were not handed over yet
        self._is_stopping = False

    def run(self) -> None:
        """The thread's main function."""
        is_busy = False
        while not self._is_stopping:
            if messages := self._read_mail(is_busy):
                self._emit(messages)
            is_busy, messages = self._step()
            if messages:
                self._emit(messages)
        goodbye = NotReadyError("The server is shutting down.")
        self._engine.commands.end_all(goodbye)
        self._emit([*self._replies(), *self._engine.fail_all(goodbye)])

    def _read_mail(self, is_busy: bool) -> list[FromLoop]:
        """Handle every message there is; with nothing to run, wait for one or for the next deadline."""
        found: list[FromLoop] = []
        try:
            if not is_busy:
                found += self._take(self._mailbox.get(timeout=self._timeout()))
            while not self._is_stopping:
                found += self._take(self._mailbox.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # SystemExit too: a thread that is gone goes unnoticed
            _log.exception("the mailbox could not be read")
            found += self._recover(overload(error) or InternalError(FAILURE))
        return found

    def _step(self) -> tuple[bool, list[FromLoop]]:
        """Returns whether anything ran. A bug ends all requests with an error, and the loop goes on."""
        try:
            is_busy, events = self._engine.step()
            return is_busy, self._noted([*events, *self._replies()])
        except BaseException as error:
            _log.exception("the step failed")
            return False, self._recover(overload(error) or InternalError(FAILURE))

    def _timeout(self) -> float | None:
        """Seconds until something must happen even without a message."""
        now = time.monotonic()
        deadline = self._engine.scheduler.next_deadline(now)
        return None if deadline is None else max(0.0, deadline - now)

    def _take(self, message: Mail) -> list[FromLoop]:
        """Handle one message; a bug in that ends all requests, and the loop goes on."""
        try:
            return self._noted([*self._handle(message), *self._replies()])
        except BaseException as error:
            _log.exception("a %s could not be handled", type(message).__name__)
            failure = overload(error) or InternalError(FAILURE)
        found = self._recover(failure)
        if isinstance(message, Call):
            found.append(Reply(message.call_id, error=failure))
        return found

    def _handle(self, message: Mail) -> Sequence[FromLoop]:
        match message:
            case Submit(request):
                self._open.add(request.request_id)
                self._desired.use(request.refs)
                return self._engine.scheduler.add(request)
            case Abort(request_id, is_answered):
                self._open.discard(request_id)
                self._engine.scheduler.abort(request_id, is_answered=is_answered)
            case LoadFinished():
                return self._engine.load_finished(message)
            case GrammarCompiled():
                return self._engine.grammar_compiled(message)
            case Command():
                self._engine.command(message)
            case GetStats(call_id):
                return [Reply(call_id, self._engine.stats())]
            case Watch():
                return [Reply(message.call_id, self._engine.view(message))]
            case Ping(call_id):
                return [Reply(call_id)]
            case Stop():
                self._is_stopping = True
        return []

    def _noted(self, messages: list[FromLoop]) -> list[FromLoop]:
        """The messages, all of which are handed over; the ends among them are no longer waited for."""
        self._open.difference_update(
            message.request_id for message in messages if isinstance(message, FinishEvent | ErrorEvent)
        )
        return messages

    def _replies(self) -> list[Reply]:
        """The replies to commands that are done now, which are part of the desired state from now on."""
        found: list[Reply] = []
        for command, reply in self._engine.commands.take_replies():
            if reply.error is None:
                self._desired.note(command.command)
            if command.call_id != _NO_CALL:
                found.append(reply)
            elif reply.error is not None:
                _log.warning("a command could not be repeated: %s", reply.error)
        return found

    # -- after a bug -------------------------------------------------------------------------------------------

    def _recover(self, error: LoraServeError) -> list[FromLoop]:
        """Every request ends, every command is answered, and the tables are empty.

        A request may have left the tables by an end that was lost with the step or the message, so the tables are not
        asked who is there. Adapters that were to leave are not among those that are fetched again.
        """
        old = self._engine
        told = self._noted([*old.take_events()])
        if self._rebuild is None:
            old.fail_all(error)
            return [*told, *self._end_all(error)]
        leaving = old.commands.end_all(error, but=(Evict, Unpin))
        replies = self._replies()
        old.execution.clear_slots()
        self._engine = self._rebuild()
        self._repeat(self._desired.limits())
        for command in leaving:
            self._engine.command(command)
        replies += self._replies()
        self._repeat(self._desired.residents())
        replies += self._replies()
        ends = self._end_all(error)
        _log.warning("the engine's tables were built anew; %d requests ended", len(ends))
        return [*replies, *told, *ends]

    def _end_all(self, error: LoraServeError) -> list[FromLoop]:
        return self._noted([ErrorEvent(request_id, error) for request_id in self._open])

    def _repeat(self, commands: Iterable[AdapterCommand]) -> None:
        for command in commands:
            self._engine.command(Command(_NO_CALL, command))
