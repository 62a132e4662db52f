"""The rows of the step that is being composed, and the tokens and the memory left for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import AllowedTokens, MemoryLoad, MemoryPlan, Row, RowAdapter, SampleInput, memory_load
from lora_serve.core.stats import MemoryStats
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.slots import SlotTable

_STEPS_BEFORE_GROWTH = 16  # successful ones before a limit lowered by lack of memory is raised again
_GROWTH = 1.25
_PROMPT_LOGPROB_CHUNK = 128  # tokens per step of a row that wants logits of every position: bounds their memory


def chunk_of(sequence: Sequence, budget: int) -> int:
    """The number of known tokens that the sequence runs next, `budget` at most; all of them for pooling."""
    if sequence.is_pooling:
        return sequence.num_remaining
    limit = min(budget, _PROMPT_LOGPROB_CHUNK) if sequence.wants_prompt_logprobs else budget
    return min(sequence.num_remaining, limit)


def row_of(sequence: Sequence, count: int, *, is_fed: bool = False) -> Row:
    """The next `count` tokens as a row, which samples if they are the last known ones. `is_fed`: see `Row`."""
    start = sequence.num_computed
    end = start + count
    pool = sequence.request.pooling
    wants_targets = sequence.wants_prompt_logprobs and start < sequence.num_prompt
    return Row(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_table=tuple(sequence.blocks),
        adapters=_adapters_of(sequence),
        sample=_sample_input(sequence) if end == len(sequence.token_ids) and pool is None else None,
        prompt_targets=tuple(sequence.token_ids[start + 1 : end + 1]) if wants_targets else None,
        num_prompt_logprobs=sequence.request.sampling.prompt_logprobs or 0,
        pool=pool,
        is_long=sequence.is_long,
        is_fed=is_fed,
        windowed_table=tuple(sequence.windowed_blocks),
    )


def _adapters_of(sequence: Sequence) -> tuple[RowAdapter, ...]:
    if not sequence.slots:
        return ()
    slots, adapters = sequence.slots, sequence.adapters
    if sequence.row_adapters is None or sequence.row_adapters[0] is not slots:  # else they are as in its last step
        made = tuple(RowAdapter(slot, use.scale, use.start) for slot, use in zip(slots, adapters, strict=True))
        sequence.row_adapters = slots, made
    return sequence.row_adapters[1]


def _sample_input(sequence: Sequence) -> SampleInput:
    params = sequence.request.sampling
    return SampleInput(
        params,
        sequence.seed,
        sequence.num_output,
        sequence.ends.eos_token_ids + params.eos_token_ids,
        sequence.request.prompt_token_ids if params.has_penalties else (),
        tuple(sequence.token_ids[sequence.num_prompt :]) if params.has_penalties or params.bad_words else (),
        sequence.constraint,
    )


@dataclass(eq=False)
class MemoryGuard:
    """Keeps weights + KV pool + resident adapters + activations(step) <= limit.

    Memory can be short all the same, through fragmentation or other programs: then steps have half as many tokens as
    the one that failed, and a quarter more after every few successful ones, until they are as large again.
    """

    _plan: MemoryPlan
    _slots: SlotTable
    _max_tokens: int | None = None
    _failed_tokens: int = 0
    _num_well: int = 0
    _num_out_of_memory: int = 0
    _last: int = 0
    _largest: int = 0

    def max_tokens(self, configured: int) -> int:
        """The most tokens of the next step."""
        return configured if self._max_tokens is None else min(configured, self._max_tokens)

    def fits(self, load: MemoryLoad, adapters: Iterable[AdapterRef]) -> bool:
        """True if a step may be composed that makes these `adapters` resident, if they are not yet."""
        if self._plan.limit is None:
            return True
        newcomers = sum(adapter.num_bytes for adapter in adapters if adapter.digest not in self._slots)
        return self._taken() + newcomers + self._plan.activations.num_bytes(load) <= self._plan.limit

    def composed(self, load: MemoryLoad) -> None:
        """Notes the step that runs next."""
        self._last = self._plan.activations.num_bytes(load)
        self._largest = max(self._largest, self._taken() + self._last)

    def ran_out(self, num_tokens: int) -> None:
        """Notes that the device had no memory for a step of so many tokens."""
        self._num_out_of_memory += 1
        self._num_well = 0
        self._failed_tokens = max(self._failed_tokens, num_tokens)
        self._max_tokens = max(1, num_tokens // 2)

    def ran_well(self) -> None:
        """Notes a step that was computed in one piece."""
        if self._max_tokens is None:
            return
        self._num_well += 1
        if self._num_well % _STEPS_BEFORE_GROWTH == 0:
            self._max_tokens = int(self._max_tokens * _GROWTH) + 1
        if self._max_tokens > self._failed_tokens:
            self._max_tokens, self._failed_tokens = None, 0

    def stats(self) -> MemoryStats:
        plan = self._plan
        return MemoryStats(
            plan.limit, plan.weight_bytes, plan.kv_bytes, self._slots.num_bytes, self._last, self._largest,
            plan.measured_peak(), self._num_out_of_memory, self._max_tokens,
        )  # fmt: skip

    def _taken(self) -> int:
        return self._plan.weight_bytes + self._plan.kv_bytes + self._slots.num_bytes


class StepRows:
    """The rows composed so far. `budget`: tokens left; below 0 after a row that is too long for any step and runs
    alone.
    """

    def __init__(self, max_tokens: int, now: float, memory: MemoryGuard) -> None:
        self.budget = memory.max_tokens(max_tokens)
        self.now = now  # seconds of time.monotonic()
        self._memory = memory
        self._rows: dict[int, tuple[Row, int]] = {}
        self.load = MemoryLoad()
        self._digests: set[str] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row, num_tokens: int) -> None:
        """Adds a row that takes `num_tokens` of the budget, padding included."""
        self._rows[row.sequence_id] = (row, num_tokens)
        self.budget -= num_tokens
        self._digests.update([adapter.slot.digest for adapter in row.adapters])
        self.load = self.load.plus(row.start, len(row.token_ids), row.num_logits, len(self._digests))

    def row(self, sequence_id: int) -> Row | None:
        """A sequence's row, if it has one."""
        found = self._rows.get(sequence_id)
        return None if found is None else found[0]

    def add_draft(self, row: Row, draft: tuple[int, ...], allowed: tuple[AllowedTokens, ...]) -> None:
        """Lengthens a row of this step by guesses. `row`: with the blocks for them."""
        assert row.sample is not None, "only what comes after the last known token is guessed"
        _, num_tokens = self._rows[row.sequence_id]
        sample = replace(row.sample, allowed_after=allowed) if allowed else row.sample
        row = replace(row, token_ids=row.token_ids + draft, num_draft=len(draft), sample=sample)
        self._rows[row.sequence_id] = (row, num_tokens + len(draft))
        self.budget -= len(draft)
        self.load = self._with_draft(row.start, len(draft))

    def fits_draft(self, start: int, count: int) -> bool:
        """True if so many guesses fit into memory in a row at `start`."""
        return self._memory.fits(self._with_draft(start, count), ())

    def _with_draft(self, start: int, count: int) -> MemoryLoad:
        """The row is counted as a chunk beside its decode row, a little more than it takes."""
        return self.load.plus(start, 1 + count, count)

    def drop(self, sequence_id: int) -> None:
        """Removes the row of a preempted sequence, if it has one."""
        _, num_tokens = self._rows.pop(sequence_id, (None, 0))
        self.budget += num_tokens
        self.load = memory_load(self.rows())
        self._digests = {adapter.slot.digest for row in self.rows() for adapter in row.adapters}

    def rows(self) -> tuple[Row, ...]:
        return tuple(row for row, _ in self._rows.values())

    def planned(self, running: Iterable[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """The running sequences in the order of a step, and how many tokens of each fit beside the rows before it."""
        ordered = sorted(running, key=lambda s: s.step_order)  # those of one token come first
        next_tokens_fit = self._next_tokens_fit([s for s in ordered if s.num_remaining == 1])
        for sequence in ordered:
            count = chunk_of(sequence, max(self.budget, 0))
            is_known = next_tokens_fit and sequence.num_remaining == 1
            yield sequence, count if is_known else self.fitting(sequence, count)

    def _next_tokens_fit(self, sequences: Collection[Sequence]) -> bool:
        """True if one token of each of these fits into memory, without other rows: one look in place of many."""
        digests = {use.ref.digest for sequence in sequences for use in sequence.adapters}
        longest, count = max((s.num_computed for s in sequences), default=0) + 1, len(sequences)
        return self._memory.fits(MemoryLoad(count, count, len(digests), count, longest), ())

    def fitting(self, sequence: Sequence, count: int) -> int:
        """The number of `count` tokens of a sequence that fit into memory beside the rows composed so far.

        Without other rows at least one token fits, as some row must go on. Rows of pooling requests fit whole or not at
        all.
        """
        if count <= 0 or self._fits(sequence, count):
            return count
        if sequence.is_pooling:
            return 0 if self._rows else count
        low, high = 0 if self._rows else 1, count  # `low` fits or must, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(sequence, middle) else (low, middle)
        return low

    def can_run(self, sequence: Sequence) -> bool:
        """True if a new sequence could run any token now."""
        return self.budget > 0 and self.fitting(sequence, sequence.num_remaining if sequence.is_pooling else 1) > 0

    def can_load(self, adapter: AdapterRef) -> bool:
        """True if the adapter could be made resident beside these rows."""
        return self._memory.fits(self.load, (adapter,))

    def _fits(self, sequence: Sequence, count: int) -> bool:
        num_logits = count if sequence.wants_prompt_logprobs else 1
        num_new = len({use.ref.digest for use in sequence.adapters} - self._digests) if sequence.adapters else 0
        load = self.load.plus(sequence.num_computed, count, num_logits, len(self._digests) + num_new)
        return self._memory.fits(load, () if sequence.slots else sequence.refs)  # what runs is resident
