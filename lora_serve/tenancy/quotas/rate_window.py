"""A sliding window made of two counters: the arithmetic of requests and tokens per minute.

    used = previous * (1 - elapsed) + current

as in Cloudflare's "How we built rate limiting capable of scaling to millions of domains" (2017). Against a fixed
window it keeps a caller from spending two minutes' worth around the turn of a minute; against a list of the last
minute's events it needs two numbers, however many tokens there are, and a number can be given back exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW = 60.0  # seconds
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class WindowCount:
    """The counts of the minute before and of this one, of which the part `elapsed` is over, 0 to 1."""

    previous: int
    current: int
    elapsed: float

    @property
    def used(self) -> float:
        """The part of a limit that is used now."""
        return self.previous * (1 - self.elapsed) + self.current

    def is_within(self, limit: int) -> bool:
        return self.used <= limit + _ROUNDING

    def remaining(self, limit: int) -> int:
        """How much could be asked for now."""
        return max(0, math.floor(limit - self.used + _ROUNDING))

    def seconds_until(self, limit: int, cost: int) -> float:
        """Seconds until `cost` fits if nobody else asks; what never does is told to come after two minutes."""
        if cost > limit:
            return 2 * WINDOW
        room = limit - self.current - cost
        if room >= 0:
            return WINDOW * max(0.0, _part_to_pass(self.previous, room) - self.elapsed)
        return WINDOW * (1 - self.elapsed + _part_to_pass(self.current, limit - cost))

    @property
    def seconds_until_unused(self) -> float:
        """Seconds until nothing counts any more."""
        if self.current > 0:
            return WINDOW * (2 - self.elapsed)
        return WINDOW * (1 - self.elapsed) if self.previous > 0 else 0.0


def _part_to_pass(count: int, room: int) -> float:
    """The part of a minute that must be over for the count of the one before it to weigh no more than `room`."""
    return 0.0 if count <= room else 1 - room / count
