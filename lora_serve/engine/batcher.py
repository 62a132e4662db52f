"""When a batch starts and how large it may be: the levers of dynamic batching over a continuous batch.

The wait window counts from the first waiting request that could run. It ends early with `preferred_batch_size` of
them, with as many tokens as a step takes, or with as many rows as there are places. Running rows never wait for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lora_serve.core.batch import StepLoad
from lora_serve.core.commands import Tune
from lora_serve.core.config import BatchLimits
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepCost

_ONLY = frozenset((0,))  # the bucket of all, where there are no buckets
_OPTIONAL = ("preferred_batch_size", "ttft_target", "itl_target")  # 0 turns these off


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Of the next step."""

    max_rows: int
    max_tokens: int


class Batcher:
    """`bucket_of`: sequences of different buckets cannot share a batch (rows that are padded to one length)."""

    def __init__(self, limits: BatchLimits, cost: StepCost, bucket_of: Callable[[Sequence], int] | None = None) -> None:
        self.limits = limits
        self.cost = cost
        self.is_bucketed = bucket_of is not None
        self.bucket_of = bucket_of or (lambda sequence: 0)

    def step_limits(self) -> StepLimits:
        """As they are in force now."""
        return StepLimits(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    def open_buckets(self, waiting: Iterable[Sequence], num_running: int, now: float) -> frozenset[int]:
        """Those whose sequences may start now."""
        if self.limits.batch_wait == 0 and not self.is_bucketed:
            return _ONLY
        limits = self.step_limits()
        buckets = self._by_bucket(waiting)
        return frozenset(
            bucket
            for bucket, sequences in buckets.items()
            if now >= self._closes_at(sequences) or self._is_full(sequences, limits, num_running)
        )

    def opens_at(self, waiting: Iterable[Sequence]) -> float | None:
        """When the next window ends by itself, in seconds of time.monotonic(); None: nobody waits for one."""
        if self.limits.batch_wait == 0:
            return None
        return min((self._closes_at(sequences) for sequences in self._by_bucket(waiting).values()), default=None)

    def tune(self, command: Tune) -> None:
        """New limits."""
        changes: dict[str, Any] = {}
        for name in Tune.__dataclass_fields__:
            value = getattr(command, name)
            if value is not None:
                changes[name] = None if name in _OPTIONAL and value == 0 else value
        self.limits = replace(self.limits, **changes)

    def observe_step(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took `seconds`."""
        self.cost.observe(load, seconds)

    def observe_first_token(self, seconds: float) -> None:
        """Of a request, from its arrival."""

    def observe_token(self, seconds: float) -> None:
        """Since the same request's token before."""

    def _by_bucket(self, waiting: Iterable[Sequence]) -> dict[int, list[Sequence]]:
        found: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in waiting:
            if sequence.ready_at < math.inf:
                found[self.bucket_of(sequence)].append(sequence)
        return found

    def _closes_at(self, sequences: list[Sequence]) -> float:
        return min(sequence.ready_at for sequence in sequences) + self.limits.batch_wait

    def _is_full(self, sequences: list[Sequence], limits: StepLimits, num_running: int) -> bool:
        preferred = self.limits.preferred_batch_size
        return (
            (preferred is not None and len(sequences) >= preferred)
            or num_running + len(sequences) >= limits.max_rows
            or sum(max(self.bucket_of(sequence), sequence.num_remaining) for sequence in sequences) >= limits.max_tokens
        )


def padded_length(sequence: Sequence) -> int:
    """The bucket of a row that is padded: the next power of two, 16 at least."""
    return max(16, 1 << (sequence.num_remaining - 1).bit_length())
