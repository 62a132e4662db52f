"""The replica with the fewest requests under way, whatever adapters are there."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.fleet_view import ReplicaView, RoutedRequest
from lora_serve.routing.routers import base


class Router(base.Router):
    """Among equally loaded replicas chance decides."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[str]:
        order = self.random.sample(replicas, len(replicas))
        return [state.replica for state in sorted(order, key=lambda state: state.num_requests)]
