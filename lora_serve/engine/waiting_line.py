"""How much waits in a line, and how fast it drains: the rate behind every Retry-After."""

from __future__ import annotations

import math

_MEMORY = 5.0  # seconds of waiting after which what was seen counts 1/e
_UNKNOWN = 1.0  # seconds to say as long as nothing has left the line


class WaitingLine:
    """Counts requests and their prompt tokens. Times are seconds of one monotonic clock.

    The rate is what left, divided by the seconds in which somebody waited, both forgotten exponentially: an empty line
    does not tell how fast it would drain.
    """

    def __init__(self, now: float) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._requests_left = 0.0
        self._tokens_left = 0.0
        self._seconds = 0.0
        self._seen_at = now

    def add(self, num_tokens: int, now: float) -> None:
        """A request with so many prompt tokens waits."""
        self._forget(now)
        self.num_requests += 1
        self.num_tokens += num_tokens

    def remove(self, num_tokens: int, now: float) -> None:
        """It waits no longer."""
        self._forget(now)
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        self._requests_left += 1
        self._tokens_left += num_tokens

    def seconds_until_left(self, num_requests: int, num_tokens: int, now: float) -> float:
        """How long it takes, at the present rates, until so many requests and so many tokens have left."""
        self._forget(now)
        if self._requests_left == 0.0:
            return _UNKNOWN
        requests = num_requests * self._seconds / self._requests_left
        return max(requests, num_tokens * self._seconds / max(self._tokens_left, 1e-9))

    def _forget(self, now: float) -> None:
        elapsed, self._seen_at = now - self._seen_at, now
        if self.num_requests == 0:
            return
        kept = math.exp(-elapsed / _MEMORY)
        self._requests_left *= kept
        self._tokens_left *= kept
        self._seconds = self._seconds * kept + _MEMORY * (1 - kept)
