"""Counts of a minute: kept in this process, in Redis (redis_counters.py), or in Redis while it is there."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

KEPT_MINUTES = 3  # counters of this minute and the one before are read
_RETRY = 2.0  # seconds without asking counters that did not answer
_log = logging.getLogger(__name__)

Counts = dict[str, tuple[int, int]]  # by name: of the minute before, of this one


class RateCounters(Protocol):
    """Counters by name and minute. Raises OSError if they cannot be reached."""

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """Adds to the counters of `minute`; returns them as they are then, with those of the minute before."""

    async def close(self) -> None:
        """Gives back what is held."""


class MemoryCounters:
    """The counters of this process alone. A wall clock that jumps and comes back finds the counts of its minute
    again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[int, Counter[str]] = {}
        self._used_at: dict[int, float] = {}  # by minute, in seconds of `clock`

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """See RateCounters."""
        now = self._clock()
        if minute not in self._minutes:
            for old in [known for known, used_at in self._used_at.items() if now - used_at > 60 * KEPT_MINUTES]:
                del self._minutes[old], self._used_at[old]
            self._minutes[minute] = Counter()
        self._used_at[minute] = now
        before, current = self._minutes.get(minute - 1, Counter()), self._minutes[minute]
        for name, amount in amounts.items():
            current[name] += amount
        return {name: (before[name], current[name]) for name in amounts}

    async def close(self) -> None:
        """See RateCounters."""


@dataclass(eq=False)
class SharedCounters:
    """The counters to use now: the shared ones, else this server's own."""

    _shared: RateCounters | None  # None: there are none to share
    _goes_on_alone: bool = True  # count here while the shared ones are away
    _clock: Callable[[], float] = time.monotonic
    _own: MemoryCounters = field(default_factory=MemoryCounters)
    _away_until: float | None = None  # when to ask again; None: they answered the last time

    @property
    def choices(self) -> tuple[RateCounters, ...]:
        """The counters to try, in order; empty: nothing can be counted now."""
        own: tuple[RateCounters, ...] = (self._own,) if self._shared is None or self._goes_on_alone else ()
        if self._shared is None or (self._away_until is not None and self._clock() < self._away_until):
            return own
        return (self._shared, *own)

    def failed(self, counters: RateCounters, error: Exception) -> None:
        """Notes that counters did not answer."""
        if counters is not self._shared:
            return
        if self._away_until is None:
            consequence = "limits are counted here alone" if self._goes_on_alone else "limited callers are refused"
            _log.warning("the shared rate counters cannot be reached (%s): %s until they can", error, consequence)
        self._away_until = self._clock() + _RETRY

    def answered(self, counters: RateCounters) -> None:
        """Notes that counters answered."""
        if counters is self._shared and self._away_until is not None:
            self._away_until = None
            _log.info("the shared rate counters answer again")

    async def close(self) -> None:
        """Give back what is held."""
        await self._own.close()
        if self._shared is not None:
            await self._shared.close()
