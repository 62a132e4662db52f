"""How often and how soon a lost engine is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW = 600.0  # seconds
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds; the first restart comes at once, each further one twice as late


class Restarts:
    """At most `limit` within WINDOW."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Seconds to wait before one more, which is counted from now on; None: there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return None
        self._times.append(now)
        number = len(self._times)
        return 0.0 if number == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (number - 2))
