"""The seam of a policy: it keeps the queue, and says who is tried first and who must give way."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import LoraServeError
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepCost


def _nowhere(adapter: AdapterRef) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What a policy may look at."""

    max_wait: float = 10.0  # seconds after which nobody may overtake a sequence any more
    weights: tuple[tuple[str, float], ...] = ()  # shares of accounts; 1 for whoever is not named
    cost: StepCost = field(default_factory=StepCost)
    is_on_device: Callable[[AdapterRef], bool] = _nowhere
    is_on_host: Callable[[AdapterRef], bool] = _nowhere


class Policy:
    """`file.py` holds `class Policy` with these six methods; this one is the base of all, in order of arrival.

    A sequence is added when it begins to wait, which it does again after a preemption, and removed when it runs or
    ends. Whatever the order, the scheduler tries all who wait, as long as there is room.
    """

    def __init__(self, view: PolicyView) -> None:
        self.view = view
        self._queue: list[Sequence] = []

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Ascending; it must not change while the sequence waits."""
        return (sequence.sequence_id,)

    def add(self, sequence: Sequence) -> None:
        """It waits."""
        bisect.insort(self._queue, sequence, key=self.key)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._queue.remove(sequence)

    def order(self, now: float) -> Iterator[Sequence]:
        """All who wait, in the order in which to try them. The queue does not change while it is read."""
        return iter(self._queue)

    def refusal(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """Why a waiting sequence should end instead; None: it should not."""
        return None

    def served(self, sequence: Sequence, num_prompt: int, num_output: int) -> None:
        """A step computed so many of its prompt tokens, and gave it so many tokens."""

    def victim(self, running: list[Sequence], newcomer: Sequence | None) -> Sequence | None:
        """Who gives way; `running`, not empty, is in order of admission.

        To a `newcomer` that finds no place, None: nobody. Without one, memory is short and somebody has to.
        """
        return None if newcomer is not None else running[-1]
