"""The step. Everything the server does to a request happens in `step`, on one thread, in this order."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.adapters.registration.smoke_test import refusal_of_errors
from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.errors import (
    AdapterUnavailableError,
    ConflictError,
    DeviceMemoryError,
    InternalError,
    LoraServeError,
)
from lora_serve.core.live import Look
from lora_serve.core.messages import (
    AdapterCommand,
    Command,
    Event,
    Evict,
    Pin,
    Prefetch,
    Reply,
    Resize,
    SetTenantBudgets,
    SmokeTest,
    SmokeTestResult,
    StepEvent,
    Tune,
    Unpin,
    Watch,
)
from lora_serve.core.stats import STEP_TOKENS, BatchInfo, ConstraintStats, EngineStats
from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.adapters.slots import SMOKE_TEST_SLOT
from lora_serve.engine.constraints.base import Constraints, GrammarCompiled
from lora_serve.engine.kv.blocks import BlockManager
from lora_serve.engine.live_view import look_at
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.runner import Runner
from lora_serve.engine.scheduling.memory_guard import MemoryGuard, run_in_parts
from lora_serve.engine.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)
_NUM_RECENT_BATCHES = 64

Outcome = SmokeTestResult | LoraServeError | None


@dataclass(eq=False)
class Engine:
    """Tables, scheduler and runner together. Not thread-safe: `loop.py` is its only caller."""

    _runner: Runner
    scheduler: Scheduler
    residency: AdapterResidency[Any]
    _blocks: BlockManager
    _memory: MemoryGuard
    _clock: Callable[[], float] = time.monotonic
    _constraints: Constraints | None = None
    recorder: Recorder = field(default_factory=Recorder)
    _commands: list[Command] = field(default_factory=list)  # that wait for something
    _done: list[tuple[Command, Outcome]] = field(default_factory=list)  # answered once the slots are loaded
    _replies: list[tuple[Command, Reply]] = field(default_factory=list)  # not taken yet
    _recent: deque[BatchInfo] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_BATCHES))
    _num_smoke_tests: int = 0
    _num_steps: int = 0
    _step_seconds: float = 0.0
    _steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    _num_step_tokens: int = 0

    @property
    def is_busy(self) -> bool:
        """True if sequences run; may be asked from any thread."""
        return bool(self.scheduler.running)

    def step(self) -> tuple[bool, list[StepEvent]]:
        """One step: expire, schedule, load slots, run, update. Returns whether anything ran, and its events."""
        start = self._clock()
        events: list[StepEvent] = [*self.scheduler.expire(start)]
        batch, news = self.scheduler.schedule(start)
        events += news
        self._load_slots()
        if batch is None:
            return False, events
        self._start_masks(batch)
        seconds_moved = self._move(batch.moves)
        is_warm_up = all(sequence.request.is_warm_up for sequence in self.scheduler.running)
        outputs = self._run(batch)
        now = self._clock()
        ran = self.scheduler.by_row() if self.recorder.is_on and not is_warm_up else None
        events += self.scheduler.update(outputs, batch, now)
        if ran is not None:
            self.recorder.step(self._num_steps + 1, batch, ran, events, start, now)
        self._load_slots()  # a command may have waited for a row that ended
        self.scheduler.observe(batch.load, now - start - seconds_moved)
        if not is_warm_up:
            self._record(batch, now - start - seconds_moved)
        return True, events

    def load_finished(self, message: LoadFinished[Any]) -> list[Event]:
        """Takes in the end of a load; requests of an adapter that cannot be had end here."""
        error = self.residency.load_finished(message)
        if error is None:
            self.scheduler.adapter_arrived(message.digest, self._clock())
            return []
        failed = [
            waiting
            for waiting in self._commands
            if isinstance(waiting.command, Prefetch | Pin | SmokeTest)
            and waiting.command.adapter.digest == message.digest
        ]
        self._commands = [command for command in self._commands if command not in failed]
        for command in failed:
            self._reply(command, error)
        return self.scheduler.fail_adapter(message.digest, error, self._clock())

    def grammar_compiled(self, message: GrammarCompiled) -> list[Event]:
        """Takes in the end of a compilation; a request whose grammar cannot be compiled ends here."""
        return self.scheduler.grammar_compiled(message, self._clock())

    def command(self, command: Command) -> None:
        """Takes in a command; its reply is among `take_replies` once it is done."""
        if isinstance(command.command, Unpin):
            self._withdraw_pins(command.command.digest)
        self._commands.append(command)
        self._load_slots()

    def take_replies(self) -> list[tuple[Command, Reply]]:
        """The commands that are done since the last call, with their replies, in order."""
        replies, self._replies = self._replies, []
        return replies

    def end_commands(self, error: LoraServeError, but: tuple[type[AdapterCommand], ...] = ()) -> list[Command]:
        """Answers every waiting command with `error`, `but` those of some kinds, which are returned."""
        commands = [*(command for command, _ in self._done), *self._commands]
        self._commands, self._done = [], []
        for command in commands:
            if not isinstance(command.command, but):
                self._reply(command, error)
        return [command for command in commands if isinstance(command.command, but)]

    def clear_slots(self) -> None:
        """Clears the device's slots, before another engine uses the runner."""
        for index in range(self.residency.slots.num_indices):
            self._runner.clear_slot(index)

    def stats(self) -> EngineStats:
        residency, slots = self.residency, tuple(self.residency.slots.infos())
        waiting = {ref.name for sequence in self.scheduler.waiting for ref in sequence.refs}
        return EngineStats(
            pid=os.getpid(),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            running_adapters=tuple(sorted({slot.name for slot in slots})),
            waiting_adapters=tuple(sorted(waiting)),
            max_loras=residency.slots.num_slots,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            block_size=self._blocks.block_size,
            num_preemptions=self.scheduler.num_preemptions,
            num_prefix_queries=self.scheduler.prefix_cache.num_queries,
            num_prefix_hits=self.scheduler.prefix_cache.num_hits,
            slots=slots,
            host_digests=residency.host.digests,
            loading_digests=residency.loading_digests,
            tiers=residency.tiers(),
            adapters=residency.counters(),
            recent_batches=tuple(self._recent),
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            steps_by_tokens=tuple(self._steps_by_tokens),
            num_step_tokens=self._num_step_tokens,
            batcher=self.scheduler.batcher.stats(self.scheduler.running),
            memory=self._memory.stats(),
            swap=self.scheduler.swapping.stats(),
            num_constrained=sum(sequence.constraint is not None for sequence in self.scheduler.running),
            num_forced=self.scheduler.outputs.num_forced,
            constraints=ConstraintStats() if self._constraints is None else self._constraints.stats(),
            speculation=self.scheduler.drafting.stats({slot.digest: slot.name for slot in slots}),
            num_hung_loads=residency.num_hung_loads,
            num_waiting_tokens=sum(
                max(0, s.num_prompt - s.num_computed) for s in (*self.scheduler.running, *self.scheduler.waiting)
            ),
            num_running_tokens=sum(sequence.num_computed for sequence in self.scheduler.running),
        )

    def look(self, asked: Watch) -> Look:
        """The engine at work; from now on it is recorded for some seconds."""
        return look_at(asked, self._clock(), self.recorder, self.scheduler, self.residency, self._blocks)

    def _copy_into_slots(self) -> dict[str, LoraServeError]:
        """Makes the slot changes that are due; returns the errors of failed copies by digest."""
        failed: dict[str, LoraServeError] = {}
        for change in self.residency.take_changes():
            if change.adapter is None:
                self._runner.clear_slot(change.slot.index)
                continue
            start = self._clock()
            try:
                self._runner.load_slot(change.slot, change.adapter)
                self.residency.copied(change.slot, self._clock() - start)
            except Exception:  # its rows are refused by the pool's check; the others run
                _log.exception("slot %d could not be loaded with %s", change.slot.index, change.slot.digest)
                self.residency.not_copied(change.slot)
                failed[change.slot.digest] = AdapterUnavailableError("The adapter cannot be copied to the device now.")
        return failed

    def _start_masks(self, batch: Batch) -> None:
        """Begins to work out what may come next in the rows that obey a grammar, beside the forward pass."""
        if self._constraints is not None:
            samples = [row.sample for row in batch.rows if row.sample is not None and row.sample.allowed is not None]
            wanted = [(sample.allowed, *sample.allowed_after) for sample in samples]
            self._constraints.start([allowed for row in wanted for allowed in row if allowed is not None])

    def _move(self, moves: BlockMoves) -> float:
        if not moves:
            return 0.0
        start = time.perf_counter()
        self._runner.move_blocks(moves)
        seconds = time.perf_counter() - start
        self.scheduler.swapping.observe(len(moves), seconds)
        return seconds

    def _run(self, batch: Batch) -> list[RowOutput]:
        """Runs the forward pass, in parts if memory is short. If it raises, every row runs alone, so that only the row
        at fault ends.

        Running a row again is harmless: it writes the same K and V to the same places.
        """
        try:
            return run_in_parts(self._attempt, batch)
        except Exception:
            _log.exception("a batch of %d rows failed; its rows run alone", len(batch.rows))
        return [
            self._run_alone(Batch((row,), batch.fresh_blocks if i == 0 else ())) for i, row in enumerate(batch.rows)
        ]

    def _run_alone(self, batch: Batch) -> RowOutput:
        try:
            return run_in_parts(self._attempt, batch)[0]
        except Exception:
            _log.exception("a row failed alone")
        return RowOutput(batch.rows[0].sequence_id, None, error=InternalError("The request could not be computed."))

    def _attempt(self, batch: Batch) -> list[RowOutput]:
        try:
            outputs = self._runner.run(batch)
        except DeviceMemoryError as error:
            self._memory.ran_out(batch.num_tokens)
            _log.warning("%d rows of %d tokens run in parts: %s", len(batch.rows), batch.num_tokens, error)
            raise
        self._memory.ran_well()
        return outputs

    def _withdraw_pins(self, digest: str) -> None:
        """Answers Pin commands that still wait for the load: done later, they would outlive the Unpin that came after
        them.
        """
        withdrawn = [c for c in self._commands if isinstance(c.command, Pin) and c.command.adapter.digest == digest]
        self._commands = [command for command in self._commands if command not in withdrawn]
        for command in withdrawn:
            self._reply(command, ConflictError("The adapter was unpinned before it was on the device."))

    def _load_slots(self) -> None:
        """Fills slots for the scheduled rows and for commands, which are answered once that is done."""
        self._commands = [command for command in self._commands if not self._execute(command)]
        failed = self._copy_into_slots()
        done, self._done = self._done, []
        for message, outcome in done:
            wanted = message.command.adapter.digest if isinstance(message.command, Prefetch | Pin) else ""
            self._reply(message, failed.get(wanted, outcome))

    def _reply(self, command: Command, outcome: Outcome) -> None:
        if isinstance(outcome, LoraServeError):
            self._replies.append((command, Reply(command.call_id, error=outcome)))
        else:
            self._replies.append((command, Reply(command.call_id, outcome)))

    def _execute(self, message: Command) -> bool:
        """Tries a command; True once it is done, or never will be."""
        command = message.command
        outcome: Outcome = None
        is_done = True
        try:
            match command:
                case Prefetch(to="host"):
                    is_done = self.residency.prefetch_to_host(command.adapter)
                case Prefetch() | Pin():
                    is_done = self.residency.prefetch(command.adapter, pin=isinstance(command, Pin))
                case SmokeTest():
                    outcome = self._smoke_test(command)
                    is_done = outcome is not None
                case Unpin():
                    self.residency.unpin(command.digest)
                case SetTenantBudgets():
                    self.residency.set_budgets(command.budgets)
                case Resize():
                    self.residency.resize(command)
                case Tune():
                    self.scheduler.batcher.tune(command)
                case Evict():
                    is_done = self.residency.evict(command.digest, forget=command.forget)
        except LoraServeError as refusal:
            is_done, outcome = True, refusal
        if is_done:
            self._done.append((message, outcome))
            self.scheduler.adapters_moved()
        return is_done

    def _smoke_test(self, command: SmokeTest) -> SmokeTestResult | None:
        """In a slot that is kept for smoke tests, so that no adapter has to leave for one; None: it is being loaded."""
        ref = command.adapter
        adapter = self.residency.fetched(ref)
        if adapter is None:
            return None
        self._num_smoke_tests += 1
        spare = SlotRef(SMOKE_TEST_SLOT, self._num_smoke_tests, ref.digest)
        self._runner.load_slot(spare, adapter)
        try:
            with refusal_of_errors(ref.label):
                return self._runner.smoke_test(
                    RowAdapter(spare, start=ref.start_in(command.token_ids) or 0), command.token_ids
                )
        finally:
            self._runner.clear_slot(spare.index)

    def _record(self, batch: Batch, seconds: float) -> None:
        self._recent.append(BatchInfo(len(batch.rows), batch.num_tokens, batch.num_adapters, seconds))
        self._num_steps += 1
        self._steps_by_tokens[bisect_left(STEP_TOKENS, batch.num_tokens)] += 1
        self._num_step_tokens += batch.num_tokens
        self._step_seconds += seconds
