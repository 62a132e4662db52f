"""A circuit breaker: whoever failed is left alone for a while, tried with a probe, then with one request.

Nygard, Release It!, 2007. Plain Python on one thread; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

_FAILURES = 3  # in a row
_FIRST_REST = 1.0
_LONGEST_REST = 60.0


class State(enum.StrEnum):
    CLOSED = "closed"  # requests pass
    OPEN = "open"  # none does
    HALF_OPEN = "half-open"  # the probe was answered: one request at a time


class Breaker:
    """Open after failures in a row, or after one that leaves no doubt; each time twice as long as before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = State.CLOSED
        self._clock = clock
        self._num_failures = 0
        self._rest = _FIRST_REST
        self._until = 0.0
        self._has_trial = False

    @property
    def lets_pass(self) -> bool:
        """True if a request may be sent now."""
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and not self._has_trial)

    @property
    def wants_probe(self) -> bool:
        """True once an open breaker has rested long enough."""
        return self.state is State.OPEN and self._clock() >= self._until

    def begin(self) -> None:
        """A request is sent."""
        self._has_trial = self._has_trial or self.state is State.HALF_OPEN

    def probed(self, *, is_well: bool) -> None:
        """The probe has ended."""
        if is_well:
            self.state, self._has_trial = State.HALF_OPEN, False
        else:
            self._open(0.0)

    def began(self) -> None:
        """An answer has begun. If it breaks off, its failure counts with those before."""
        if self.state is State.HALF_OPEN:
            self.state, self._has_trial = State.CLOSED, False

    def succeeded(self) -> None:
        """A request was answered to its end."""
        if self.state is not State.OPEN:
            self._num_failures, self._rest = 0, _FIRST_REST

    def abandoned(self) -> None:
        """A request ended without saying anything of whoever was asked."""
        self._has_trial = False

    def failed(self, *, is_certain: bool = False, rest: float = 0.0) -> None:
        """A request failed. `is_certain`: the next one would too. `rest`: the least time to leave it alone."""
        self._num_failures += 1
        if self.state is State.OPEN:
            return  # it was under way when it was opened
        if is_certain or self.state is State.HALF_OPEN or self._num_failures >= _FAILURES:
            self._open(rest)

    def _open(self, rest: float) -> None:
        self.state, self._has_trial = State.OPEN, False
        self._until = self._clock() + min(_LONGEST_REST, max(self._rest, rest))
        self._rest = min(_LONGEST_REST, 2 * self._rest)
