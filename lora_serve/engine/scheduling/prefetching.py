"""What is done for waiting sequences before their turn: loads of their adapters, and free slots for these."""

from __future__ import annotations

from itertools import islice
from typing import Any

from lora_serve.engine.adapters.cold_start import ColdPatience
from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.scheduling.step_rows import StepRows

LOOK_AHEAD = 64  # waiting sequences whose adapters are asked for before their turn
_PLACE_AHEAD = 2  # adapters put into free slots before their turn, in one step


class LookAhead:
    """Looks when `is_due`: somebody came or went, or something arrived."""

    def __init__(self, policy: Policy, patience: ColdPatience, residency: AdapterResidency[Any]) -> None:
        self._policy = policy
        self._patience = patience
        self._residency = residency
        self.is_due = False

    def look(self, rows: StepRows, now: float) -> None:
        """At the next in the queue; `rows`: of the step, which needs its memory for itself."""
        if not self.is_due:
            return
        num_placed, has_room = 0, True
        for sequence in islice(self._policy.ahead(now), LOOK_AHEAD):
            self._patience.settle(sequence, now)
            if has_room:  # nobody further back overtakes whoever the host has no room for
                has_room = self._patience.ask(sequence)
            for ref in sequence.refs:
                can_place = num_placed < _PLACE_AHEAD and rows.has_memory_for(ref)
                num_placed += can_place and self._residency.place_ahead(ref)
        self.is_due = num_placed > 0  # there is more room now
