"""Who runs in the next step, and what became of those who ran: continuous batching (Orca, Yu et al., OSDI 2022)
with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024), prefix caching, preemption by recompute, and adapter
slots.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    LoraServeError,
    QueueFullError,
    RequestTimeoutError,
)
from lora_serve.core.events import ErrorEvent, Event
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.answers import finish_of, pooled_events, token_events
from lora_serve.engine.batcher import Batcher, StepLimits
from lora_serve.engine.blocks import BlockManager
from lora_serve.engine.patience import ColdPatience
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.rows import chunk_of, row_of
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_rows import StepRows

_LOOK_AHEAD = 64  # waiting sequences whose adapters are asked for before their turn
_PLACE_AHEAD = 2  # adapters put into free slots before their turn, in one step


class Scheduler:
    """Owns every sequence. `waiting` ones hold nothing of the device, `running` ones blocks and perhaps slots."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        prefix_cache: PrefixCache,
        residency: AdapterResidency[Any],
        policy: Policy,
        batcher: Batcher,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self.prefix_cache = prefix_cache
        self._residency = residency
        self._patience = ColdPatience(residency)
        self._policy = policy
        self.batcher = batcher
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._random = random.Random(config.seed)
        self._num_added = 0
        self._by_request: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # in no order: that is the policy's
        self.running: list[Sequence] = []  # in order of admission: the last is the youngest
        self.num_preemptions = 0
        self._look_ahead_is_due = False

    # -- coming and going --------------------------------------------------------------------------------------

    def add(self, request: InferenceRequest) -> list[Event]:
        """Take a request in, or refuse it."""
        if len(self.waiting) >= (limit := self._config.queue.max_requests):
            full = QueueFullError(f"The queue is full ({limit} requests wait); try again later.")
            return [ErrorEvent(request.request_id, full)]
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        sequence = Sequence(
            self._num_added, request, seed, list(request.prompt_token_ids), request.adapters, request.fallback
        )
        self._num_added += 1
        self._by_request[request.request_id] = sequence
        self._enqueue(sequence)
        error = self._patience.join(sequence, request.arrival_time)
        return [] if error is None else [self._fail(sequence, error)]

    def abort(self, request_id: str) -> None:
        """End a request nobody waits for; an unknown id ended meanwhile."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._release(sequence)

    def fail_adapter(self, digest: str, error: LoraServeError, now: float) -> list[Event]:
        """End every waiting request of an adapter that cannot be had, unless somebody else may answer it."""
        self._look_ahead_is_due = True
        return [
            self._fail(sequence, final)
            for sequence in self._waiting_for(digest)
            if (final := self._patience.load_failed(sequence, digest, error, now)) is not None
        ]

    def adapter_arrived(self, digest: str, now: float) -> None:
        """An adapter is in host memory: whoever waited only for it waits for its turn from now on."""
        self._look_ahead_is_due = True
        for sequence in self._waiting_for(digest):
            self._patience.is_cold(sequence, now)

    def fail_all(self, error: LoraServeError) -> list[Event]:
        """End every request: the engine stops, or failed in a way that leaves no block to be trusted."""
        self.prefix_cache.clear()
        return [self._fail(sequence, error) for sequence in list(self._by_request.values())]

    def expire(self, now: float) -> list[Event]:
        """End requests whose deadline, or whose patience with a cold adapter, is over."""
        return [
            self._fail(sequence, error)
            for sequence in list(self._by_request.values())
            if (error := self._lateness(sequence, now)) is not None
        ]

    def next_deadline(self, now: float) -> float | None:
        """When a step must be tried even if nothing happens, in seconds of time.monotonic()."""
        sequences = self._by_request.values()
        times = [time for s in sequences for time in (s.request.deadline, self._patience.ends_at(s))]
        opens_at = self.batcher.opens_at(self.waiting)
        times.append(opens_at if opens_at is not None and opens_at > now else None)
        return min((time for time in times if time is not None), default=None)

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> tuple[Batch | None, list[Event]]:
        """The next batch, None if nobody can run now; and the refusals found on the way."""
        limits = self.batcher.step_limits()
        rows = StepRows(limits.max_tokens)
        preempted = self.num_preemptions
        self._schedule_running(rows)
        order = tuple(self._policy.order(now)) if self.waiting else ()
        first = next((sequence for sequence in order if sequence.adapters), None)
        self._residency.favour(() if first is None else first.refs)
        events = self._admit(order, rows, limits, now) if self.num_preemptions == preempted else []
        self._look_ahead(now)
        if not rows:
            return None, events
        return Batch(rows.rows(), self._blocks.take_fresh()), events

    def update(self, outputs: list[RowOutput], batch: Batch, now: float) -> list[Event]:
        """Take in one step's results: tokens, ends, errors."""
        events: list[Event] = []
        sequences = {sequence.sequence_id: sequence for sequence in self.running}
        for row, output in zip(batch.rows, outputs, strict=True):
            sequence = sequences[row.sequence_id]
            if output.error is not None:
                self.prefix_cache.distrust(sequence)
                events.append(self._fail(sequence, output.error))
                continue
            if output.prompt_logprobs and row.start == len(sequence.prompt_logprobs):
                sequence.prompt_logprobs.extend(output.prompt_logprobs)
            sequence.num_computed += len(row.token_ids)
            self.prefix_cache.publish(sequence, row.start)
            num_prompt = max(0, min(sequence.num_computed, sequence.num_prompt) - row.start)
            self._policy.served(sequence, num_prompt, int(output.token_id is not None))
            events.extend(self._take_output(sequence, output, now))
        return events

    def _schedule_running(self, rows: StepRows) -> None:
        """Rows of running sequences, those that decode first."""
        for sequence in sorted(self.running, key=lambda s: s.num_remaining > 1):
            count = chunk_of(sequence, max(rows.budget, 0))
            if count > 0 and sequence in self.running and self._reserve(sequence, count, rows):
                rows.add(row_of(sequence, count, self._eos_token_ids), count)

    def _admit(self, order: tuple[Sequence, ...], rows: StepRows, limits: StepLimits, now: float) -> list[Event]:
        """Waiting sequences in the policy's order, as long as rows, tokens, blocks and slots last."""
        events: list[Event] = []
        slot_is_owed = False  # to a sequence passed over too often: no younger adapter row may hold a slot before it
        passed_over: list[Sequence] = []
        buckets = self.batcher.open_buckets(order, len(self.running), now) if order else frozenset()
        for sequence in order:
            if rows.budget <= 0 or not self._has_place(sequence, limits, rows):
                break
            bucket = self.batcher.bucket_of(sequence)
            if bucket not in buckets:
                continue
            if rows and sequence.is_pooling and max(bucket, sequence.num_remaining) > rows.budget:
                break
            self._patience.settle(sequence, now)
            if self.running and not self.prefix_cache.has_room(sequence):
                break
            if sequence.adapters:
                if slot_is_owed:
                    continue
                try:
                    has_slots = self._acquire(sequence, now)
                except AdapterUnavailableError as error:
                    events.append(self._fail(sequence, error))
                    continue
                if not has_slots:
                    passed_over.append(sequence)
                    waited_long = sequence.num_passed_over >= limits.max_rows
                    slot_is_owed = waited_long and not self._patience.cold(sequence.adapters)
                    continue
                for older in passed_over:
                    older.num_passed_over += 1
            self._start(sequence, now)
            count = chunk_of(sequence, rows.budget)
            self._reserve(sequence, count, rows)
            rows.add(row_of(sequence, count, self._eos_token_ids), max(bucket, count))
            if self.batcher.is_bucketed:
                buckets = frozenset((bucket,))
        return events

    def _has_place(self, newcomer: Sequence, limits: StepLimits, rows: StepRows) -> bool:
        """Whether one more may run; the policy may make somebody give way."""
        if len(self.running) < limits.max_rows:
            return True
        victim = self._policy.victim(self.running, newcomer)
        if victim is not None:
            self._preempt(victim, rows)
        return victim is not None

    def _acquire(self, sequence: Sequence, now: float) -> bool:
        """Slots for all of the sequence's adapters; False: not now."""
        if self._patience.is_cold(sequence, now):
            return False
        sequence.slots = self._residency.acquire(sequence.refs)
        return bool(sequence.slots)

    def _look_ahead(self, now: float) -> None:
        """The adapters of the next in the queue are loaded, and put into free slots, before it is their turn."""
        if not self._look_ahead_is_due:
            return
        num_placed, has_room = 0, True
        for sequence in islice(tuple(self._policy.order(now)), _LOOK_AHEAD):
            self._patience.settle(sequence, now)
            if has_room:  # nobody further back overtakes whoever the host has no room for
                has_room = self._patience.ask(sequence)
            for ref in sequence.refs:
                num_placed += num_placed < _PLACE_AHEAD and self._residency.place_ahead(ref)
        self._look_ahead_is_due = num_placed > 0  # there is more room now

    def _waiting_for(self, digest: str) -> list[Sequence]:
        return [s for s in self.waiting if any(ref.digest == digest for ref in s.wanted)]

    def _start(self, sequence: Sequence, now: float) -> None:
        self._patience.start(sequence)
        self._look_ahead_is_due = True
        self._dequeue(sequence)
        self.running.append(sequence)
        self.prefix_cache.attach(sequence)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now

    def _reserve(self, sequence: Sequence, count: int, rows: StepRows) -> bool:
        """Blocks for `count` more tokens; others are preempted for them, at last the sequence itself (False)."""
        if sequence.is_pooling:
            return True
        missing = self._blocks.num_needed(sequence.num_computed + count) - len(sequence.blocks)
        while missing > self._blocks.num_free:
            victim = self._policy.victim(self.running, None)
            assert victim is not None, "when memory is short, the policy names somebody"
            self._preempt(victim, rows)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._blocks.allocate(max(missing, 0)))
        return True

    def _take_output(self, sequence: Sequence, output: RowOutput, now: float) -> list[Event]:
        if output.pooled is not None:
            self._note_time(sequence, now)
            events = pooled_events(sequence, output.pooled, now)
            self._release(sequence)
            return events
        if output.token_id is None:
            return []
        self._note_time(sequence, now)
        events = token_events(sequence, output.token_id, output.logprobs, now)
        finish = finish_of(sequence, output.token_id, self._eos_token_ids, self._max_model_len)
        if finish is not None:
            self._release(sequence)
            events.append(finish)
        return events

    def _note_time(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token_at is None:
            self.batcher.observe_first_token(now - sequence.ready_at)
        else:
            self.batcher.observe_token(now - sequence.last_token_at)
        sequence.last_token_at = now

    # -- the one release path ----------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: LoraServeError) -> ErrorEvent:
        self._release(sequence)
        return ErrorEvent(sequence.request.request_id, error)

    def _release(self, sequence: Sequence) -> None:
        """Finish, abort, error, timeout and disconnect all end here."""
        self._give_back(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._dequeue(sequence)
        self._patience.leave(sequence)
        self._look_ahead_is_due = True
        del self._by_request[sequence.request.request_id]

    def _preempt(self, sequence: Sequence, rows: StepRows) -> None:
        """Back to waiting with its tokens; K and V that were not kept are computed again later."""
        rows.drop(sequence.sequence_id)
        self._give_back(sequence)
        sequence.num_computed = 0
        self.running.remove(sequence)
        self._enqueue(sequence)
        self.num_preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.blocks)
        sequence.blocks.clear()
        for slot in sequence.slots:
            self._residency.release(slot)
        sequence.slots = ()

    def _enqueue(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._policy.add(sequence)
        self._look_ahead_is_due = True

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._policy.remove(sequence)

    # -- time --------------------------------------------------------------------------------------------------

    def _lateness(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Why the request ends now, if it does. A patience that is over may also make another answer it."""
        if sequence.first_scheduled is None and (refusal := self._policy.refusal(sequence, now)) is not None:
            return refusal
        deadline = sequence.request.deadline
        if deadline is not None and now >= deadline:
            return RequestTimeoutError("The request's timeout_ms passed before it was done.")
        ends_at = self._patience.ends_at(sequence)
        return self._patience.end(sequence, now) if ends_at is not None and now >= ends_at else None
