"""The commands of the admin and the wiring about adapters and limits: done at once, or once the adapter is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.registration.verification import refusal_of_errors
from lora_serve.core.batch import RowAdapter, SlotRef
from lora_serve.core.errors import ConflictError, LoraServeError
from lora_serve.core.messages import (
    AdapterCommand,
    Command,
    Evict,
    Pin,
    Prefetch,
    Reply,
    Resize,
    SetTenantBudgets,
    SmokeTest,
    SmokeTestResult,
    Tune,
    Unpin,
)
from lora_serve.engine.execution import Execution
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.engine.slots import SMOKE_TEST_SLOT

_Result = SmokeTestResult | LoraServeError | None


@dataclass(eq=False)
class Commands:
    """The commands that wait for something, those that are done, and the replies that were not taken yet."""

    _execution: Execution
    _scheduler: Scheduler
    _residency: AdapterResidency[Any]
    _waiting: list[Command] = field(default_factory=list)
    _done: list[tuple[Command, _Result]] = field(default_factory=list)  # answered once the slots are loaded
    _replies: list[tuple[Command, Reply]] = field(default_factory=list)
    _num_smoke_tests: int = 0

    @property
    def is_idle(self) -> bool:
        """True if none waits for anything, and none is to be answered."""
        return not (self._waiting or self._done)

    def add(self, command: Command) -> None:
        if isinstance(command.command, Unpin):
            self._withdraw_pins(command.command.digest)
        self._waiting.append(command)

    def execute(self) -> None:
        """Tries those that wait; their slots are loaded next."""
        self._waiting = [command for command in self._waiting if not self._execute(command)]

    def answer(self, failed: Mapping[str, LoraServeError]) -> None:
        """Answers what is done. `failed`: errors of copies into slots, by digest."""
        done, self._done = self._done, []
        for message, outcome in done:
            wanted = message.command.adapter.digest if isinstance(message.command, Prefetch | Pin) else ""
            self._reply(message, failed.get(wanted, outcome))

    def fail_adapter(self, digest: str, error: LoraServeError) -> None:
        """Answers those that wait for an adapter that cannot be had."""
        self._end(
            lambda command: isinstance(command, Prefetch | Pin | SmokeTest) and command.adapter.digest == digest, error
        )

    def take_replies(self) -> list[tuple[Command, Reply]]:
        """The commands that are done since the last call, with their replies, in order."""
        replies, self._replies = self._replies, []
        return replies

    def end_all(self, error: LoraServeError, but: tuple[type[AdapterCommand], ...] = ()) -> list[Command]:
        """Answers every command with `error`, `but` those of some kinds, which are returned."""
        commands = [*(command for command, _ in self._done), *self._waiting]
        self._waiting, self._done = [], []
        for command in commands:
            if not isinstance(command.command, but):
                self._reply(command, error)
        return [command for command in commands if isinstance(command.command, but)]

    def _withdraw_pins(self, digest: str) -> None:
        """Answers Pin commands that still wait for the load: done later, they would outlive the Unpin that came after
        them.
        """
        self._end(
            lambda command: isinstance(command, Pin) and command.adapter.digest == digest,
            ConflictError("The adapter was unpinned before it was on the device."),
        )

    def _end(self, is_meant: Callable[[AdapterCommand], bool], error: LoraServeError) -> None:
        ended = [command for command in self._waiting if is_meant(command.command)]
        self._waiting = [command for command in self._waiting if command not in ended]
        for command in ended:
            self._reply(command, error)

    def _reply(self, command: Command, outcome: _Result) -> None:
        if isinstance(outcome, LoraServeError):
            self._replies.append((command, Reply(command.call_id, error=outcome)))
        else:
            self._replies.append((command, Reply(command.call_id, outcome)))

    def _execute(self, message: Command) -> bool:
        """Tries a command; True once it is done, or never will be."""
        command = message.command
        outcome: _Result = None
        is_done = True
        try:
            match command:
                case Prefetch(to="host"):
                    is_done = self._residency.prefetch_to_host(command.adapter)
                case Prefetch() | Pin():
                    is_done = self._residency.prefetch(command.adapter, pin=isinstance(command, Pin))
                case SmokeTest():
                    outcome = self._smoke_test(command)
                    is_done = outcome is not None
                case Unpin():
                    self._residency.unpin(command.digest)
                case SetTenantBudgets():
                    self._residency.set_budgets(command.budgets)
                case Resize():
                    self._residency.resize(command)
                case Tune():
                    self._scheduler.batcher.tune(command)
                case Evict():
                    is_done = self._residency.evict(command.digest, forget=command.forget)
        except LoraServeError as refusal:
            is_done, outcome = True, refusal
        if is_done:
            self._done.append((message, outcome))
            self._scheduler.prefetcher.is_due = True  # there may be space for other adapters, or fewer of them
        return is_done

    def _smoke_test(self, command: SmokeTest) -> SmokeTestResult | None:
        """In a slot that is kept for smoke tests, so that no adapter has to leave for one; None: it is being loaded."""
        ref = command.adapter
        adapter = self._residency.fetched(ref)
        if adapter is None:
            return None
        self._num_smoke_tests += 1
        spare = SlotRef(SMOKE_TEST_SLOT, self._num_smoke_tests, ref.digest)
        self._execution.runner.load_slot(spare, adapter)
        try:
            with refusal_of_errors(ref.label):
                return self._execution.runner.smoke_test(
                    RowAdapter(spare, start=ref.start_in(command.token_ids) or 0), command.token_ids
                )
        finally:
            self._execution.runner.clear_slot(spare.index)
