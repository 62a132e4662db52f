"""The seam of a scheduling policy: the queue, the order in which requests are tried, and the choice of a victim."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import LoraServeError
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepCost

Key = tuple[float, ...]


class AgedQueue:
    """A queue in which no request is overtaken for ever: requests that waited `max_wait` seconds first, then by `key`.

    Adding, removing and reading the first few cost O(log n) comparisons and the moving of pointers.
    """

    def __init__(self, max_wait: float, key: Callable[[Sequence], Key]) -> None:
        """`key`: ascending; it ends with the sequence's id and does not change while the sequence waits."""
        self._max_wait = max_wait
        self._key = key
        self._ranked: list[Sequence] = []
        self._waiting: list[Sequence] = []  # the longest first

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def waits_since(self) -> float:
        """The time since which the longest waiting sequence waits; infinity if none does."""
        return self._waiting[0].waiting_since if self._waiting else math.inf

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._ranked, sequence, key=self._key)
        bisect.insort(self._waiting, sequence, key=_patience_key)

    def remove(self, sequence: Sequence) -> None:
        _remove(self._ranked, sequence, self._key)
        _remove(self._waiting, sequence, _patience_key)

    def aged(self, now: float) -> list[Sequence]:
        """The sequences that may not be overtaken, the longest waiting first."""
        return self._waiting[: self._num_aged(now)]

    def order(self, now: float) -> Iterator[Sequence]:
        """All sequences as they are now: the queue may change while this is read."""
        num_aged = self._num_aged(now)
        if num_aged == 0:
            return iter(self._ranked.copy())
        if num_aged == len(self._waiting):
            return iter(self._waiting.copy())
        horizon = now - self._max_wait
        return chain(self._waiting[:num_aged], (s for s in self._ranked.copy() if s.waiting_since > horizon))

    def _num_aged(self, now: float) -> int:
        return bisect.bisect_right(self._waiting, now - self._max_wait, key=lambda s: s.waiting_since)


def _patience_key(sequence: Sequence) -> Key:
    return (sequence.waiting_since, sequence.sequence_id)


def _remove(ordered: list[Sequence], sequence: Sequence, key: Callable[[Sequence], Key]) -> None:
    index = bisect.bisect_left(ordered, key(sequence), key=key)
    assert ordered[index] is sequence, "a sequence's key changed while it waited"
    del ordered[index]


def _nowhere(adapter: AdapterRef) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The facts that a policy may look at."""

    max_wait: float = 10.0  # seconds after which a sequence may no longer be overtaken
    weights: tuple[tuple[str, float], ...] = ()  # shares of accounts; 1 for those not named
    cost: StepCost = field(default_factory=StepCost)
    is_on_device: Callable[[AdapterRef], bool] = _nowhere
    is_on_host: Callable[[AdapterRef], bool] = _nowhere  # or on the device
    num_slots: Callable[[], int] = lambda: 1
    num_known: Callable[[Sequence], int] = lambda sequence: 0  # tokens that the prefix cache would give it


class Policy:
    """The base of all policies, first come, first served within a priority; a file of this folder overrides what it
    changes.

    A sequence is added when it begins to wait, which it does again after a preemption, and removed when it runs or
    ends. The scheduler tries all waiting sequences in order while rows, tokens and blocks last: a policy never idles.

    Sequences that have waited `view.max_wait` come first, the longest waiting first, then the others by `key`: a
    sequence is overtaken during that time only. Time that it ran before a preemption does not count, time waited before
    it does.
    """

    def __init__(self, view: PolicyView) -> None:
        self.view = view
        self._queue = AgedQueue(view.max_wait, self.key)

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """The sort key: ascending, ending with the id; it must not change while the sequence waits."""
        return (sequence.request.priority, sequence.sequence_id)

    def add(self, sequence: Sequence) -> None:
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def order(self, now: float) -> Iterator[Sequence]:
        """All waiting sequences in the order in which to try them, as it is now: the queue may change while this is
        read.
        """
        return self._queue.order(now)

    def prefetch_order(self, now: float) -> Iterator[Sequence]:
        """All waiting sequences in the order in which to load their adapters."""
        return self.order(now)

    def refusal(self, sequence: Sequence, now: float) -> LoraServeError | None:
        """The error with which a waiting sequence should end now; None: it should not."""
        return None

    def served(self, sequence: Sequence, num_prompt: int, num_output: int) -> None:
        """Counts prompt tokens that a step computed for the first time, and tokens that it generated."""

    def may_take_slot(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """True if another adapter may be evicted for one of this sequence."""
        return True

    def victim(self, running: list[Sequence], newcomer: Sequence | None) -> Sequence | None:
        """The sequence to preempt; `running`, not empty, is in order of admission.

        For a `newcomer` that finds no place, None means that no sequence gives way. Without a newcomer memory is short,
        and one must be named.
        """
        return None if newcomer is not None else running[-1]
