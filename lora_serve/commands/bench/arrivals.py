"""Arrival times of an open loop: gaps of a gamma process, of which Poisson is the case of burstiness 1."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at `rate` requests per second. Gaps have the mean 1 / rate and the variation coefficient burstiness **
    -0.5.

    burstiness: the gamma distribution's shape, as in vLLM's benchmark: 1 is a Poisson process, 0.25 comes in bursts,
    100 is almost regular.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, generator: random.Random) -> Iterator[float]:
        """Yields seconds from the start, without end."""
        scale = 1.0 / (self.rate * self.burstiness)
        return itertools.accumulate(generator.gammavariate(self.burstiness, scale) for _ in itertools.count())
