"""A replica that has the adapter, unless too much is under way there: few copies of rare adapters, many of hot ones.

Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, SODA
2018): each set of adapters has its own order of replicas, and no replica gets a request while its tokens are above
1.25 times the mean. Reports correct the order: among those below the bound, one that has the adapters on its device
comes first, then in host memory, then on the way; among equals one that has computed the prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.replica_state import ReplicaState
from lora_serve.routing.routed_request import RoutedRequest
from lora_serve.routing.routers import base

BOUND = 1.25  # of the mean load
SLACK = 2048  # tokens that a replica may have beyond the mean, so that a fleet with little to do does not spread


class Router(base.Router):
    """Those below the bound first, then the least loaded."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> list[str]:
        limit = bound(request, replicas)
        below = [state for state in replicas if state.load < limit]
        above = sorted((state for state in replicas if state.load >= limit), key=lambda state: state.load)
        key = base.home_key(request)

        def preference(state: ReplicaState) -> tuple[int, int, int, int]:
            tier, num_roots = state.tier(request.digests), state.num_known_roots(request.roots)
            load = 0 if request.digests or num_roots else state.load
            return (tier, -num_roots, load, -base.score(key, state.replica))

        return [state.replica for state in [*sorted(below, key=preference), *above]]


def bound(request: RoutedRequest, replicas: Sequence[ReplicaState]) -> float:
    """Tokens that a replica may have before it gets the request."""
    mean = (sum(state.load for state in replicas) + request.num_tokens) / max(1, len(replicas))
    return max(BOUND * mean, mean + SLACK)
