"""Who runs in the next step, and what became of those who ran: continuous batching (Orca, Yu et al., OSDI 2022)
with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024), prefix caching, preemption by recompute, and adapter
slots.
"""

from __future__ import annotations

import bisect
import random
from typing import Any

from lora_serve.core.batch import Batch, Row, RowOutput
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    LoraServeError,
    QueueFullError,
    RequestTimeoutError,
)
from lora_serve.core.events import ErrorEvent, Event, FinishEvent, PromptEvent, TokenEvent
from lora_serve.core.request import FinishReason, GenerateRequest
from lora_serve.engine.blocks import BlockManager
from lora_serve.engine.patience import ColdPatience
from lora_serve.engine.policies import Policy
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.rows import chunk_of, row_of
from lora_serve.engine.sequence import Sequence

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
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self.prefix_cache = prefix_cache
        self._residency = residency
        self._patience = ColdPatience(residency)
        self._policy = policy
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._random = random.Random(config.seed)
        self._num_added = 0
        self._by_request: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []  # in the policy's order
        self.running: list[Sequence] = []  # in order of admission: the last is the youngest
        self.num_preemptions = 0
        self._look_ahead_is_due = False

    # -- coming and going --------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> list[Event]:
        """Take a request in, or refuse it."""
        if len(self.waiting) >= self._config.max_queue:
            return [
                ErrorEvent(
                    request.request_id,
                    QueueFullError(f"The queue is full ({self._config.max_queue} requests wait); try again later."),
                )
            ]
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

    def next_deadline(self) -> float | None:
        """When `expire` must be called next, in seconds of time.monotonic()."""
        sequences = self._by_request.values()
        times = [time for s in sequences for time in (s.request.deadline, self._patience.ends_at(s))]
        return min((time for time in times if time is not None), default=None)

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> tuple[Batch | None, list[Event]]:
        """The next batch, None if nobody can run now; and the refusals found on the way."""
        rows: dict[int, Row] = {}
        preempted = self.num_preemptions
        budget = self._schedule_running(rows, self._config.max_num_batched_tokens)
        first = next((sequence for sequence in self.waiting if sequence.adapters), None)
        self._residency.favour(() if first is None else first.refs)
        events = self._admit(rows, budget, now) if self.num_preemptions == preempted else []
        self._look_ahead(now)
        if not rows:
            return None, events
        return Batch(tuple(rows.values()), self._blocks.take_fresh()), events

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
            if output.token_id is not None:
                events.extend(self._take_token(sequence, output, now))
        return events

    def _schedule_running(self, rows: dict[int, Row], budget: int) -> int:
        """Rows of running sequences, those that decode first; returns the tokens left."""
        for sequence in sorted(self.running, key=lambda s: s.num_remaining > 1):
            count = chunk_of(sequence, budget)
            if count == 0 or sequence not in self.running or not self._reserve(sequence, count, rows):
                continue
            rows[sequence.sequence_id] = row_of(sequence, count, self._eos_token_ids)
            budget = self._config.max_num_batched_tokens - sum(len(row.token_ids) for row in rows.values())
        return budget

    def _admit(self, rows: dict[int, Row], budget: int, now: float) -> list[Event]:
        """Waiting sequences in the policy's order, as long as rows, tokens, blocks and slots last."""
        events: list[Event] = []
        slot_is_owed = False  # to a sequence passed over too often: no younger adapter row may hold a slot before it
        passed_over: list[Sequence] = []
        for sequence in list(self.waiting):
            if len(self.running) >= self._config.max_num_seqs or budget == 0:
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
                    waited_long = sequence.num_passed_over >= self._config.max_num_seqs
                    slot_is_owed = waited_long and not self._patience.cold(sequence.adapters)
                    continue
                for older in passed_over:
                    older.num_passed_over += 1
            self._start(sequence, now)
            count = chunk_of(sequence, budget)
            self._reserve(sequence, count, rows)
            rows[sequence.sequence_id] = row_of(sequence, count, self._eos_token_ids)
            budget -= count
        return events

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
        for sequence in self.waiting[:_LOOK_AHEAD]:
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
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.prefix_cache.attach(sequence)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now

    def _reserve(self, sequence: Sequence, count: int, rows: dict[int, Row]) -> bool:
        """Blocks for `count` more tokens; the youngest sequences are preempted for them, at last itself (False)."""
        missing = self._blocks.num_needed(sequence.num_computed + count) - len(sequence.blocks)
        while missing > self._blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            rows.pop(victim.sequence_id, None)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._blocks.allocate(max(missing, 0)))
        return True

    def _take_token(self, sequence: Sequence, output: RowOutput, now: float) -> list[Event]:
        request, token = sequence.request, output.token_id
        assert token is not None
        events: list[Event] = []
        if sequence.num_output == 0:
            wanted = request.sampling.prompt_logprobs is not None
            prompt = (None, *sequence.prompt_logprobs) if wanted else None
            events.append(
                PromptEvent(request.request_id, sequence.timings(now), prompt, sequence.num_cached, sequence.fell_back)
            )
        if request.sampling.max_tokens > 0:
            sequence.token_ids.append(token)
            events.append(TokenEvent(request.request_id, token, output.logprobs))
        finish = self._finish(sequence, token)
        if finish is not None:
            self._release(sequence)
            events.append(finish)
        return events

    def _finish(self, sequence: Sequence, token: int) -> FinishEvent | None:
        request, params = sequence.request, sequence.request.sampling
        if sequence.num_output >= params.min_tokens:
            is_eos = token in self._eos_token_ids and not params.ignore_eos
            if params.max_tokens > 0 and (is_eos or token in params.stop_token_ids):
                return FinishEvent(request.request_id, FinishReason.STOP, token)
        if sequence.num_output >= params.max_tokens or len(sequence.token_ids) >= self._max_model_len:
            return FinishEvent(request.request_id, FinishReason.LENGTH)
        return None

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
            self.waiting.remove(sequence)
        self._patience.leave(sequence)
        self._look_ahead_is_due = True
        del self._by_request[sequence.request.request_id]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting with its tokens; K and V that were not kept are computed again later."""
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
        bisect.insort(self.waiting, sequence, key=self._policy.key)
        self._look_ahead_is_due = True

    # -- time --------------------------------------------------------------------------------------------------

    def _lateness(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Why the request ends now, if it does. A patience that is over may also make another answer it."""
        deadline = sequence.request.deadline
        if deadline is not None and now >= deadline:
            return RequestTimeoutError("The request's timeout_ms passed before it was done.")
        ends_at = self._patience.ends_at(sequence)
        return self._patience.end(sequence, now) if ends_at is not None and now >= ends_at else None
