"""The newest times of one kind, and their percentiles."""

from __future__ import annotations

from collections import deque

_NUM_KEPT = 512


class RecentTimes:
    """Seconds; the last 512 of them."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """By nearest rank; None: there is none yet."""
        ordered = sorted(self._seconds)
        return ordered[int(0.95 * (len(ordered) - 1) + 0.5)] if ordered else None
