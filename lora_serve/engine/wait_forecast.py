"""A forecast of the wait in a queue: how many come first, times the pace at which requests start.

Plain Python on the event loop's thread. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

_WEIGHT = 0.15  # of the newest interval: the last dozen count


class _Pace:
    """A running mean of the time between two events. An interval under way counts for as long as it is already, so that
    a queue which has come to a stop is noticed before its next event.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._since = 0.0  # when the interval under way began

    def begin(self, now: float) -> None:
        self._since = now

    def note(self, now: float) -> None:
        self._count += 1
        self._mean += max(_WEIGHT, 1 / self._count) * (now - self._since - self._mean)
        self._since = now

    def seconds(self, now: float) -> float:
        under_way = now - self._since
        return self._mean + max(0.0, (_WEIGHT if self._count else 1.0) * (under_way - self._mean))


class WaitForecast:
    """Two paces: at which requests leave the queue while others wait, and at which rows end while none is free."""

    def __init__(self) -> None:
        self.places: int | None = None  # rows that run at once, as the engine last said; None: not known
        self._running: set[str] = set()  # request ids
        self._line, self._rows = _Pace(), _Pace()
        self._num_tokens = 0.0  # of the prompts that left, a running mean

    @property
    def is_full(self) -> bool:
        """True if a newcomer has to wait for the end of a row."""
        return self.places is not None and len(self._running) >= self.places

    def begin(self, now: float) -> None:
        """The first request entered an empty queue."""
        self._line.begin(now)

    def left(self, num_tokens: int, now: float, *, others_wait: bool) -> None:
        """A request with so many prompt tokens left the queue. If nobody waits behind it and rows were free, it has not
        waited: it only came to its step.
        """
        if others_wait or self.is_full:
            self._line.note(now)
            self._num_tokens += (_WEIGHT if self._num_tokens else 1.0) * (num_tokens - self._num_tokens)

    def started(self, request_id: str, now: float) -> None:
        """A request has a row."""
        was_full = self.is_full
        self._running.add(request_id)
        if self.is_full and not was_full:
            self._rows.begin(now)

    def ended(self, request_id: str, now: float) -> None:
        """A request has no row any more, or never had one."""
        if request_id not in self._running:
            return
        if self.is_full:
            self._rows.note(now)
        self._running.discard(request_id)

    def seconds(self, num_waiting: int, num_tokens: int, now: float) -> float:
        """The seconds that a newcomer waits behind so many requests with so many prompt tokens."""
        of_rows = self._rows.seconds(now) if self.is_full else 0.0
        if num_waiting == 0:
            return of_rows
        places = max(num_waiting + 1, num_tokens / self._num_tokens if self._num_tokens else 0.0)
        return max(self._line.seconds(now), of_rows) * places
