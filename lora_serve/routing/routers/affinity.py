"""A replica that has the adapter, unless too much is under way there: few copies of rare adapters, many of hot ones.

Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, SODA
2018): each set of adapters has its own order of replicas, and no replica gets a request while its tokens are above
1.25 times the mean. Reports correct the order: replicas that have the adapters, or are loading them, come before all
others, and of these the ones that have computed the prompt's beginning. Device and host memory count alike: a copy into
a slot is short, and an adapter that cools goes back to its home, so that the others forget it. One that no replica has
goes where it pushes no other out.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.fleet_view import ReplicaView, RoutedRequest, Tier
from lora_serve.routing.routers import base

BOUND = 1.25  # of the mean load
LOAD_TOKENS = 2048  # where no report tells what a load of an adapter costs


class Router(base.Router):
    """Replicas that have the adapters, then those with room for one adapter more, then the least loaded."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[str]:
        limit, stretched = limits(request, replicas)
        key = base.home_key(request)

        def preference(state: ReplicaView) -> tuple[int, int, int, int]:
            has_adapters, home = state.tier(request.digests) is not Tier.NONE, -base.score(key, state.replica)
            if has_adapters and state.load < limit:
                num_roots = state.num_known_roots(request.roots)
                return (0, -num_roots, 0 if request.digests or num_roots else state.load, home)
            if has_adapters and state.load < stretched:
                return (1, state.load, 0, home)
            is_full = state.report is not None and state.report.is_host_full
            return (2, is_full, 0, home) if state.load < limit else (3, state.load, 0, home)

        return [state.replica for state in sorted(replicas, key=preference)]


def limits(request: RoutedRequest, replicas: Sequence[ReplicaView]) -> tuple[float, float]:
    """Tokens that a replica may have before it gets the request; and if it has the adapters and no other has that is
    below them.

    Above the mean there is always room for one more such request, or a fleet with little to do would spread its
    adapters; and a replica that has the adapters may be behind by the time of the load that it spares another.
    """
    num_tokens = max(1, request.num_tokens)
    mean = (sum(state.load for state in replicas) + num_tokens) / max(1, len(replicas))
    costs = [state.report.load_tokens for state in replicas if state.report is not None and state.report.load_tokens]
    limit = max(BOUND * mean, mean + num_tokens)
    return limit, max(limit, mean + (sum(costs) / len(costs) if costs else LOAD_TOKENS))
