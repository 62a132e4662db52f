"""A forecast of the wait in a queue, from the pace at which requests left it while some waited."""

from __future__ import annotations

_WEIGHT = 0.15  # of the newest interval: the last dozen count


class WaitForecast:
    """Running means of the time between two departures, and of the prompt tokens that left.

    An interval begins with a departure, or with the first request of an empty queue, so that idle time does not count.
    While nobody leaves, the interval under way counts for as long as it is already: a queue that has come to a stop is
    noticed before its next departure. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._interval = 0.0
        self._num_tokens = 0.0
        self._since = 0.0  # when the interval under way began
        self._num_left = 0

    def begin(self, now: float) -> None:
        """The first request entered an empty queue."""
        self._since = now

    def left(self, num_tokens: int, now: float) -> None:
        """A request with so many prompt tokens left the queue."""
        self._num_left += 1
        weight = max(_WEIGHT, 1 / self._num_left)
        self._interval += weight * (now - self._since - self._interval)
        self._num_tokens += weight * (num_tokens - self._num_tokens)
        self._since = now

    def seconds(self, num_requests: int, num_tokens: int, now: float) -> float:
        """The seconds until so many requests, and so many tokens, have left; as many as known to be too few before any
        has left.
        """
        under_way = now - self._since
        if self._num_left == 0:
            return under_way
        pace = self._interval + max(0.0, _WEIGHT * (under_way - self._interval))
        shares = num_tokens / self._num_tokens if self._num_tokens else 0.0
        return pace * max(num_requests, shares)
