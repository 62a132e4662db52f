"""Priority classes that overtake and preempt: a lower number is a higher class, as in vLLM's `--scheduling-policy`.

No livelock: a sequence that has waited `max_wait` seconds in all, over all its preemptions, comes first, and counts as
the highest class once it runs, so that it is not preempted again. Each preemption costs its victim a step of waiting at
least, so there are finitely many before that. A long wait alone preempts no other sequence: two sequences could preempt
one another in turns.
"""

from __future__ import annotations

import math

from lora_serve.engine.policies import base
from lora_serve.engine.sequence import Sequence


class Policy(base.Policy):
    """Order of arrival within a class."""

    def victim(self, running: list[Sequence], newcomer: Sequence | None) -> Sequence | None:
        """The youngest sequence of the lowest class; for a newcomer only if that class is lower than its own."""
        victim = max(reversed(running), key=self._class_of)  # the first of equals: the youngest
        if newcomer is not None and self._class_of(victim) <= newcomer.request.priority:
            return None
        return victim

    def _class_of(self, running: Sequence) -> float:
        return -math.inf if running.waited >= self.view.max_wait else running.request.priority
