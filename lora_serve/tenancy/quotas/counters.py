"""Where the counts of a minute are kept: in this process, in Redis (redis_counters.py), or in Redis while it is there.

The storages of the package `limits` hold the numbers here. Its strategies are not used: none can give back what was
reserved and not used, a moving window keeps an entry per token, and its scripts in Redis need EVAL, which the server's
Redis user need not have. What a storage has, adding to a counter by any number, a negative one too, is enough.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from limits.aio.storage import MemoryStorage

KEPT_SECONDS = 180  # this minute and the one before are looked at
_SWEEP = 30.0  # seconds between two looks for counters that have expired

Counts = dict[str, tuple[int, int]]  # by name: of the minute before, of this one


class RateCounters(Protocol):
    """Counters by name and minute. Raises OSError if they cannot be reached."""

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """Add to the counters of `minute`, and say what is in them then and in those of the minute before."""

    async def close(self) -> None:
        """Give back what is held."""


class _Storage(MemoryStorage):
    """The base looks through all counters for those that have expired at every addition; here once in a while."""

    _swept_at = 0.0  # seconds of time.monotonic()

    async def _MemoryStorage__schedule_expiry(self) -> None:  # noqa: N802 - the base's name for it
        if time.monotonic() - self._swept_at >= _SWEEP:
            self._swept_at = time.monotonic()
            await super()._MemoryStorage__schedule_expiry()  # type: ignore[misc]


class MemoryCounters:
    """See RateCounters. Of this process alone."""

    def __init__(self) -> None:
        self._storage = _Storage()

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """See RateCounters."""
        counts: Counts = {}
        for name, amount in amounts.items():
            current = await self._storage.incr(f"{name}:{minute}", KEPT_SECONDS, amount)
            counts[name] = (await self._storage.get(f"{name}:{minute - 1}"), current)
        return counts

    async def close(self) -> None:
        """See RateCounters."""
        if self._storage.timer is not None:
            self._storage.timer.cancel()
