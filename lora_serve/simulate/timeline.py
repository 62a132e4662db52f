"""Virtual time: one event loop for the whole fleet, and a clock of each replica."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """What time it is for one replica, in seconds. In the middle of a step it is ahead of the timeline."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timeline:
    """Actions by time; of one time, in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num_planned = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do it then; not in the past."""
        assert time >= self.now, "the past is over"
        heapq.heappush(self._heap, (time, self._num_planned, action))
        self._num_planned += 1

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
