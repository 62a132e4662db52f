"""Counts the events in one tier since start. Without a lock: the owner of the tier owns the counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lora_serve.core.stats import EvictionReason, TierStats


@dataclass(slots=True)
class TierCounts:
    """Running counts; `frozen` gives a snapshot."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_seconds: float = 0.0  # summed
    evictions: Counter[EvictionReason] = field(default_factory=Counter)

    def loaded(self, seconds: float) -> None:
        """Count a load into the tier."""
        self.loads += 1
        self.load_seconds += seconds

    def frozen(self, num_items: int | None, num_bytes: int | None, budget: int | None) -> TierStats:
        """A snapshot with what is resident now (None: unknown); `budget` in bytes, None: no limit."""
        return TierStats(
            self.hits,
            self.misses,
            self.loads,
            self.evictions.total(),
            self.load_seconds,
            num_bytes,
            budget or 0,
            num_items,
            dict(self.evictions),
        )
