"""A queue in any order of rank, in which nobody is overtaken for ever."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from itertools import chain

from lora_serve.engine.sequence import Sequence

Key = tuple[float, ...]


class AgedQueue:
    """First whoever has waited `max_wait` seconds or more, the longest first; then the others by `key`.

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
        """Since when the one waits that waits longest; infinity if nobody does."""
        return self._waiting[0].waiting_since if self._waiting else math.inf

    def add(self, sequence: Sequence) -> None:
        """It waits since `sequence.waiting_since`."""
        bisect.insort(self._ranked, sequence, key=self._key)
        bisect.insort(self._waiting, sequence, key=_patience_key)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        _remove(self._ranked, sequence, self._key)
        _remove(self._waiting, sequence, _patience_key)

    def aged(self, now: float) -> list[Sequence]:
        """Whom nobody may overtake."""
        return self._waiting[: self._num_aged(now)]

    def order(self, now: float) -> Iterator[Sequence]:
        """All of them, as they are now: the queue may change while this is read."""
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
