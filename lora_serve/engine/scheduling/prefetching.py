"""Prefetching for waiting requests: loads of their adapters before their turn, and placement into free slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from lora_serve.engine.adapters.cold_start import ColdStart
from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.scheduling.step_rows import StepRows

PREFETCH_WINDOW = 64  # waiting sequences whose adapters are loaded before their turn
_MAX_PLACED = 2  # adapters put into free slots before their turn, in one step


@dataclass(slots=True)
class AdapterPrefetcher:
    """Prefetches once per change (`is_due`): a request came or went, an adapter arrived, or a command was done."""

    _policy: Policy
    _cold_start: ColdStart
    _residency: AdapterResidency[Any]
    is_due: bool = False

    def prefetch(self, rows: StepRows, now: float) -> None:
        """Looks at the next requests in the queue. `rows`: the step's, which needs its memory for itself."""
        if not self.is_due:
            return
        num_placed, has_room = 0, True
        for sequence in islice(self._policy.prefetch_order(now), PREFETCH_WINDOW):
            self._cold_start.fall_back_if_due(sequence, now)
            if has_room:  # a later request must not take room that an earlier one waits for
                has_room = self._cold_start.ask(sequence)
            for ref in sequence.refs:
                can_place = num_placed < _MAX_PLACED and rows.has_memory_for(ref)
                num_placed += can_place and self._residency.place_if_free(ref)
        self.is_due = num_placed > 0  # there is more room now
