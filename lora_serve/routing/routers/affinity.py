"""A replica that has the adapter, unless too much is under way there: few copies of rare adapters, many of hot ones.

Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, SODA
2018): each set of adapters has its own order of replicas, and no replica gets a request while its tokens are above
1.25 times the mean. Reports correct the order: of those below the bound, replicas that have the adapters, or are
loading them, come first, and of these the ones that have computed the prompt's beginning. Device and host memory count
alike: a copy into a slot is short, and an adapter that cools goes back to its home, so that the others forget it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.replica_state import ReplicaState, Tier
from lora_serve.routing.routed_request import RoutedRequest
from lora_serve.routing.routers import base

BOUND = 1.25  # of the mean load
_LOAD_TOKENS = 2048  # where no report tells what a load of an adapter costs


class Router(base.Router):
    """Those below the bound first, then the least loaded."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> list[str]:
        limit = bound(request, replicas)
        below = [state for state in replicas if state.load < limit]
        above = sorted((state for state in replicas if state.load >= limit), key=lambda state: state.load)
        key = base.home_key(request)

        def preference(state: ReplicaState) -> tuple[bool, int, int, int]:
            is_missing, num_roots = state.tier(request.digests) is Tier.NONE, state.num_known_roots(request.roots)
            load = 0 if request.digests or num_roots else state.load
            return (is_missing, -num_roots, load, -base.score(key, state.replica))

        return [state.replica for state in [*sorted(below, key=preference), *above]]


def bound(request: RoutedRequest, replicas: Sequence[ReplicaState]) -> float:
    """Tokens that a replica may have before it gets the request.

    Beyond the mean at least what a load elsewhere would cost, or one more such request: so a fleet with little to do
    does not spread its adapters.
    """
    num_tokens = max(1, request.num_tokens)
    mean = (sum(state.load for state in replicas) + num_tokens) / max(1, len(replicas))
    costs = [state.report.load_tokens for state in replicas if state.report is not None and state.report.load_tokens]
    slack = sum(costs) / len(costs) if costs else _LOAD_TOKENS
    return max(BOUND * mean, mean + max(slack, num_tokens))
