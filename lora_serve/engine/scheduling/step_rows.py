"""The rows of the step that is being composed, and the tokens and the memory that are left for others."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Row
from lora_serve.core.memory import MemoryLoad, memory_load
from lora_serve.engine.rows import wants_prompt_logprobs
from lora_serve.engine.scheduling.memory_guard import MemoryGuard
from lora_serve.engine.sequence import Sequence


class StepRows:
    """`budget`: tokens that still fit; below 0 after a row that is too long for any step and runs alone."""

    def __init__(self, max_tokens: int, now: float, memory: MemoryGuard) -> None:
        self.budget = memory.max_tokens(max_tokens)
        self.now = now  # seconds of time.monotonic()
        self._memory = memory
        self._rows: dict[int, tuple[Row, int]] = {}
        self._load = MemoryLoad()
        self._digests: set[str] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def load(self) -> MemoryLoad:
        return replace(self._load, num_adapters=len(self._digests))

    def add(self, row: Row, num_tokens: int) -> None:
        """`num_tokens`: what it takes of the budget, padding included."""
        self._rows[row.sequence_id] = (row, num_tokens)
        self.budget -= num_tokens
        one = memory_load((row,))
        self._load = self._load.plus(row.start, one.num_tokens, one.num_logits)
        self._digests.update(adapter.slot.digest for adapter in row.adapters)

    def drop(self, sequence_id: int) -> None:
        """Its sequence was preempted; it need not have a row."""
        _, num_tokens = self._rows.pop(sequence_id, (None, 0))
        self.budget += num_tokens
        self._load = memory_load(self.rows())
        self._digests = {adapter.slot.digest for row in self.rows() for adapter in row.adapters}

    def rows(self) -> tuple[Row, ...]:
        return tuple(row for row, _ in self._rows.values())

    def fitting(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens of a sequence memory has room for beside the rows that are here.

        Without other rows at least one has, as somebody must go on. What is pooled is taken whole or not at all.
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

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a newcomer could run any token now."""
        return self.budget > 0 and self.fitting(sequence, sequence.num_remaining if sequence.is_pooling else 1) > 0

    def has_memory_for(self, adapter: AdapterRef) -> bool:
        """Whether it could be made resident beside these rows."""
        return self._memory.fits(self.load, (adapter,))

    def _fits(self, sequence: Sequence, count: int) -> bool:
        num_logits = count if wants_prompt_logprobs(sequence) else 1
        load = self._load.plus(sequence.num_computed, count, num_logits)
        digests = self._digests.union(ref.digest for ref in sequence.refs)
        return self._memory.fits(replace(load, num_adapters=len(digests)), sequence.refs)
