"""Continuous batching: which sequences run in the next step, and what a step's results mean to them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lora_serve.core.batch import Batch, RowOutput, StepLoad
from lora_serve.core.constraints import Constraints, GrammarCompiled
from lora_serve.core.errors import AdapterUnavailableError, InvalidRequestError, LoraServeError, RequestTimeoutError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, StartedEvent, StepEvent
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.engine.batcher import Batcher
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.adapter_waits import PREFETCH_WINDOW, AdapterPrefetcher, ColdStart, SlotTurns
from lora_serve.engine.scheduling.drafting import Drafting, Outputs
from lora_serve.engine.scheduling.step_rows import MemoryGuard, StepRows, chunk_of, row_of
from lora_serve.engine.sequence import Ends, Sequence, is_end
from lora_serve.engine.step_cost import StepLimits
from lora_serve.engine.swapping import Swapping


@dataclass(eq=False)
class Scheduler:
    """Owns every sequence. `waiting` ones hold nothing of the device, `running` ones blocks and perhaps slots."""

    _random: random.Random
    _blocks: BlockTables
    prefix_cache: PrefixCache
    _residency: AdapterResidency[Any]
    _policy: Policy
    batcher: Batcher
    _ends: Ends
    _memory: MemoryGuard
    swapping: Swapping
    drafting: Drafting
    _constraints: Constraints | None
    _recorder: Recorder
    waiting: list[Sequence] = field(default_factory=list)  # in no order: that is the policy's
    running: list[Sequence] = field(default_factory=list)  # in order of admission: the last is the youngest
    num_preemptions: int = 0
    _num_added: int = 0
    _by_request: dict[str, Sequence] = field(default_factory=dict)
    _scheduled_at: float = -math.inf
    tried_all_at: float = -math.inf  # when every sequence that waits was tried last, and nothing has changed since

    def __post_init__(self) -> None:
        self._cold_start = ColdStart(self._residency)
        self.prefetcher = AdapterPrefetcher(self._policy, self._cold_start, self._residency)
        self.outputs = Outputs(self.prefix_cache, self._policy, self.batcher, self.drafting)

    # -- coming and going --------------------------------------------------------------------------------------

    def add(self, request: InferenceRequest) -> list[Event]:
        """Takes a request in; whether it may wait was decided at the door (`queue_gate.py`)."""
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        prompt, adapters = list(request.prompt_token_ids), request.adapters
        sequence = Sequence(self._num_added, request, seed, prompt, adapters, request.fallback, self._ends)
        self._num_added += 1
        self._by_request[request.request_id] = sequence
        self._enqueue(sequence, request.arrival_time)
        error = self._cold_start.join(sequence, request.arrival_time) or self._compile(request)
        return [] if error is None else [self._fail(sequence, error)]

    def _compile(self, request: InferenceRequest) -> LoraServeError | None:
        """Begins to compile the request's grammar, if it has one; returns an error where that is not possible."""
        if request.grammar is None:
            return None
        if self._constraints is None:
            return InvalidRequestError("This server cannot hold its answers to a grammar.")
        self._constraints.compile(request.request_id, request.scope, request.grammar)
        return None

    def grammar_compiled(self, message: GrammarCompiled, now: float) -> list[Event]:
        """Takes in the end of a compilation: the request may run, or ends here. It may be gone already."""
        if (sequence := self._by_request.get(message.request_id)) is None:
            return []
        if message.error is not None:
            return [self._fail(sequence, message.error)]
        sequence.constraint, sequence.compiled_at = message.constraint, now
        self.prefetcher.is_due = True
        return []

    def abort(self, request_id: str, *, is_answered: bool = False) -> None:
        """Ends a request whose client is gone, or has its answer; an unknown id has ended already."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._release(sequence, FinishEvent(request_id, FinishReason.STOP) if is_answered else None)

    def fail_adapter(self, digest: str, error: LoraServeError, now: float) -> list[Event]:
        """Ends the waiting requests of an adapter that cannot be had, unless their fallback answers."""
        self.prefetcher.is_due = True
        return [
            self._fail(sequence, final)
            for sequence in self._waiting_for(digest)
            if (final := self._cold_start.load_failed(sequence, digest, error, now)) is not None
        ]

    def adapter_arrived(self, digest: str, now: float) -> None:
        """Notes that an adapter is in host memory, so that requests which lacked only this one may run."""
        self.prefetcher.is_due = True
        for sequence in self._waiting_for(digest):
            self._cold_start.fall_back_if_due(sequence, now)
            self._cold_start.note_cold(sequence, now)

    def running_by_id(self) -> dict[int, Sequence]:
        """The sequences that run, by the ids of their rows."""
        return {sequence.sequence_id: sequence for sequence in self.running}

    def waiting_in_order(self, now: float) -> Iterator[Sequence]:
        """Those that wait, in the order in which they are tried."""
        return self._policy.order(now)

    def fail_all(self, error: LoraServeError) -> list[Event]:
        """Ends every request: the engine stops, or failed in a way that leaves no block to be trusted."""
        self.prefix_cache.clear()
        return [self._fail(sequence, error) for sequence in list(self._by_request.values())]

    def expire(self, now: float) -> list[Event]:
        """Ends requests whose deadline or cold timeout is over."""
        return [
            self._fail(sequence, error)
            for sequence in list(self._by_request.values())
            if (error := self._expiry_error(sequence, now)) is not None
        ]

    def next_deadline(self, now: float) -> float | None:
        """When a step must be tried even if nothing happens, in seconds of time.monotonic()."""
        sequences = self._by_request.values()
        times = [time for s in sequences for time in (s.request.deadline, self._cold_start.ends_at(s))]
        times.append(self.batcher.opens_at(self.waiting, after=min(now, self._scheduled_at)))
        return min((time for time in times if time is not None), default=None)

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> tuple[Batch | None, list[StepEvent]]:
        """The next batch, None if nothing can run now; and events of requests that started or were refused."""
        self._scheduled_at, self.tried_all_at = now, -math.inf
        limits = self.batcher.step_limits(self.running, len(self.waiting))
        rows = StepRows(limits.max_tokens, now, self._memory)
        num_before = self.num_preemptions
        self._schedule_running(rows)
        nearest = islice(self._policy.order(now), PREFETCH_WINDOW)
        first = next((sequence for sequence in nearest if sequence.adapters), None)
        self._residency.protect(() if first is None else first.refs)
        events = self._admit(rows, limits, now) if self.num_preemptions == num_before else []
        self.prefetcher.prefetch(rows, now)
        if not rows:
            return None, events
        self.drafting.add(self.running, rows)
        self._memory.composed(rows.load)
        fresh, *windowed = self._blocks.take_fresh()
        return Batch(rows.rows(), fresh, self.swapping.take_moves(), *windowed), events

    def update(self, outputs: list[RowOutput], batch: Batch, now: float) -> list[Event]:
        """Takes in one step's results: tokens, ends, errors."""
        events: list[Event] = []
        sequences = self.running_by_id()
        for row, output in zip(batch.rows, outputs, strict=True):
            sequence = sequences[row.sequence_id]
            found = self.outputs.take(sequence, row, output, now)
            if found and is_end(found[-1]):
                self._release(sequence, found[-1])
            elif sequence.is_long != row.is_long:
                self._recompute_all(sequence)
            elif row.num_draft:
                self.drafting.trim(sequence)
            events += found
        return events

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from the time that a step took."""
        self.drafting.observe(load, seconds)
        self.batcher.observe_step(load, seconds)

    def _schedule_running(self, rows: StepRows) -> None:
        before = self.num_preemptions
        for sequence, count in rows.planned(self.running):
            is_here = before == self.num_preemptions or sequence in self.running
            if count > 0 and is_here and self._reserve(sequence, count, rows):
                rows.add(row_of(sequence, count), count)

    def _admit(self, rows: StepRows, limits: StepLimits, now: float) -> list[StepEvent]:
        """Starts waiting sequences in the policy's order, as long as rows, tokens, blocks and slots last."""
        events: list[StepEvent] = []
        horizon = now - self._policy.view.max_wait
        turns = SlotTurns(self._residency, self._policy, self.running, limits.max_rows, horizon)
        buckets = self.batcher.open_buckets(self.waiting, limits, len(self.running), rows.budget, now)
        for sequence in self._policy.order(now):
            if sequence.is_compiling:
                continue
            if not rows.can_run(sequence):
                break
            bucket = self.batcher.bucket_of(sequence)
            if bucket not in buckets and not sequence.has_run:
                continue
            if rows and sequence.is_pooling and max(bucket, sequence.num_remaining) > rows.budget:
                break
            self._cold_start.fall_back_if_due(sequence, now)
            if not self._can_admit(sequence, limits) and self._policy.victim(self.running, sequence) is None:
                break
            if sequence.adapters and not self._take_slots(sequence, turns, rows, events, now):
                continue
            if not self._make_way(sequence, limits, rows):
                self._give_back(sequence)
                break
            turns.started(sequence)
            if sequence.first_scheduled is None:
                events.append(StartedEvent(sequence.request.request_id))
            self._start(sequence, now)
            count = rows.fitting(sequence, chunk_of(sequence, rows.budget))
            if count and self._reserve(sequence, count, rows):
                rows.add(row_of(sequence, count), max(bucket, count))
            if self.batcher.is_bucketed:
                buckets = frozenset((bucket,))
        else:
            self.tried_all_at = now
        return events

    def _take_slots(
        self, sequence: Sequence, turns: SlotTurns, rows: StepRows, events: list[StepEvent], now: float
    ) -> bool:
        """Takes slots of all its adapters; False: not now, or never, which `events` then says."""
        if self._cold_start.note_cold(sequence, now) or not turns.allows(sequence):
            return False
        try:
            has_slots = turns.acquire(sequence, lambda victim: self._preempt(victim, rows))
        except AdapterUnavailableError as error:
            events.append(self._fail(sequence, error))
            return False
        if not has_slots:
            turns.passed_over(sequence)
        return has_slots

    def _can_admit(self, newcomer: Sequence, limits: StepLimits) -> bool:
        has_place = len(self.running) < limits.max_rows
        return not self.running or (has_place and self.prefix_cache.can_allocate(newcomer))

    def _make_way(self, newcomer: Sequence, limits: StepLimits, rows: StepRows) -> bool:
        """Preempts the policy's victims until it can be admitted; False: that was not enough."""
        while not self._can_admit(newcomer, limits):
            victim = self._policy.victim(self.running, newcomer)
            if victim is None:
                return False
            self._preempt(victim, rows)
        return True

    def _waiting_for(self, digest: str) -> list[Sequence]:
        return [s for s in self.waiting if any(ref.digest == digest for ref in s.wanted)]

    def _start(self, sequence: Sequence, now: float) -> None:
        self._cold_start.start(sequence)
        self.prefetcher.is_due = True
        self._dequeue(sequence)
        sequence.waited = now - sequence.waiting_since
        self.running.append(sequence)
        self.prefix_cache.attach(sequence)
        self.swapping.swap_in(sequence)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now

    def _reserve(self, sequence: Sequence, count: int, rows: StepRows) -> bool:
        """Allocates blocks for `count` more tokens; preempts others for them, at last the sequence itself (False)."""
        if sequence.is_pooling:
            return True
        missing = self._blocks.num_missing(sequence, sequence.num_computed + count)
        while missing > self._blocks.num_free:
            victim = self._policy.victim(self.running, None)
            assert victim is not None, "when memory is short, the policy names a victim"
            self._preempt(victim, rows)
            if victim is sequence:
                return False
        self._blocks.add(sequence, missing)
        return True

    # -- the one release path ----------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: LoraServeError) -> ErrorEvent:
        event = ErrorEvent(sequence.request.request_id, error)
        self._release(sequence, event)
        return event

    def _release(self, sequence: Sequence, end: Event | None = None) -> None:
        """The one release path: finish, abort (without `end`), error, timeout and disconnect all end here."""
        self._recorder.ended(sequence, end)
        self._give_back(sequence)
        self.swapping.discard(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._dequeue(sequence)
        self._cold_start.leave(sequence)
        self.prefetcher.is_due = True
        del self._by_request[sequence.request.request_id]

    def _preempt(self, sequence: Sequence, rows: StepRows) -> None:
        """Returns a sequence to the queue; K and V that are not swapped out are computed again later."""
        rows.drop(sequence.sequence_id)
        self.swapping.swap_out(sequence)
        self._give_back(sequence)
        self.running.remove(sequence)
        self._enqueue(sequence, rows.now)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _recompute_all(self, sequence: Sequence) -> None:
        """Forgets K and V of a sequence that has become long: it runs on once they are computed by the long factors."""
        self._free_blocks(sequence)
        sequence.block_keys.clear()
        self.prefix_cache.attach(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self._blocks.cut(sequence, 0)
        sequence.num_computed = sequence.num_published = sequence.num_dropped = 0

    def _give_back(self, sequence: Sequence) -> None:
        self._free_blocks(sequence)
        for slot in sequence.slots:
            self._residency.release(slot)
        sequence.slots = ()

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.waiting_since = now - sequence.waited
        self.waiting.append(sequence)
        self._policy.add(sequence)
        self.prefetcher.is_due = True

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._policy.remove(sequence)

    # -- time --------------------------------------------------------------------------------------------------

    def _expiry_error(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """The error with which a late request ends; None if it goes on, maybe with its fallback's adapters."""
        if sequence.first_scheduled is None and (refusal := self._policy.refusal(sequence, now)) is not None:
            return refusal
        deadline = sequence.request.deadline
        if deadline is not None and now >= deadline:
            return RequestTimeoutError("The request's timeout_ms passed before it was done.")
        ends_at = self._cold_start.ends_at(sequence)
        return self._cold_start.end(sequence, now) if ends_at is not None and now >= ends_at else None
