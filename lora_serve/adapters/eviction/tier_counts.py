"""What happened in one tier since start. Plain numbers without a lock: whoever owns the tier owns this."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lora_serve.core.stats import EvictionReason, TierStats


@dataclass(slots=True)
class TierCounts:
    """Counted up as it happens; `frozen` is the snapshot."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_seconds: float = 0.0  # summed
    evictions: Counter[EvictionReason] = field(default_factory=Counter)

    def loaded(self, seconds: float) -> None:
        """One more load into the tier."""
        self.loads += 1
        self.load_seconds += seconds

    def frozen(self, num_items: int | None, num_bytes: int | None, budget: int | None) -> TierStats:
        """With what is resident now (None: not known here); `budget` in bytes, None: no limit."""
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
