"""Shared counters that may be away: then each replica counts by itself, or nobody is let in, as the operator says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lora_serve.tenancy.quotas.counters import MemoryCounters, RateCounters

_RETRY = 2.0  # seconds without asking counters that did not answer
_log = logging.getLogger(__name__)


class SharedCounters:
    """Which counters to use now: the shared ones, else this server's own."""

    def __init__(
        self, shared: RateCounters | None, goes_on_alone: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`shared` None: there are none to share. `goes_on_alone`: count here while the shared ones are away."""
        self._shared = shared
        self._own = MemoryCounters()
        self._goes_on_alone = goes_on_alone
        self._clock = clock
        self._away_until: float | None = None  # when to ask again; None: they answered the last time

    @property
    def choices(self) -> tuple[RateCounters, ...]:
        """In the order in which to try them; none: nobody can be counted now."""
        own: tuple[RateCounters, ...] = (self._own,) if self._shared is None or self._goes_on_alone else ()
        if self._shared is None or (self._away_until is not None and self._clock() < self._away_until):
            return own
        return (self._shared, *own)

    def failed(self, counters: RateCounters, error: Exception) -> None:
        """They did not answer."""
        if counters is not self._shared:
            return
        if self._away_until is None:
            consequence = "limits are counted here alone" if self._goes_on_alone else "limited callers are refused"
            _log.warning("the shared rate counters cannot be reached (%s): %s until they can", error, consequence)
        self._away_until = self._clock() + _RETRY

    def answered(self, counters: RateCounters) -> None:
        """They did."""
        if counters is self._shared and self._away_until is not None:
            self._away_until = None
            _log.info("the shared rate counters answer again")

    async def close(self) -> None:
        """Give back what is held."""
        await self._own.close()
        if self._shared is not None:
            await self._shared.close()
