"""The less loaded of two replicas that are drawn at random: what Ray Serve does by default.

Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 1996.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.fleet_view import ReplicaView, RoutedRequest
from lora_serve.routing.routers import base


class Router(base.Router):
    """By requests under way; the others follow at random."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[str]:
        order = self.random.sample(replicas, len(replicas))
        drawn = sorted(order[:2], key=lambda state: state.num_requests)
        return [state.replica for state in [*drawn, *order[2:]]]
