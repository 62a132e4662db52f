"""A replica that holds the adapter, unless too much is under way there: few copies of rare adapters, many of hot ones.

The replicas of an adapter are tried in the order of rendezvous hashing with bounded loads (Mirrokni et al., SODA 2018):
no replica gets a request while it has more than 1.25 times the mean. Among those that may and hold the adapter, the
least loaded one gets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lora_serve.simulate.routers import base

_BOUND = 1.25  # of the mean load


class Router(base.Router):
    """The adapter's holders first, then its order of replicas."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._orders: dict[str, tuple[int, ...]] = {}

    def choose(self, digest: str, loads: Sequence[int], holds: Callable[[int, str], bool]) -> int:
        limit = math.ceil(_BOUND * (sum(loads) + 1) / self.num_replicas)
        order = [replica for replica in self._order(digest) if loads[replica] < limit]
        holders = [replica for replica in order if holds(replica, digest)]
        return min(holders, key=lambda replica: loads[replica]) if holders else order[0]

    def _order(self, digest: str) -> tuple[int, ...]:
        if digest not in self._orders:
            replicas = range(self.num_replicas)
            self._orders[digest] = tuple(sorted(replicas, key=lambda replica: base.score(digest, replica)))
        return self._orders[digest]
