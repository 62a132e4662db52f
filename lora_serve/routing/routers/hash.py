"""One fixed replica per adapter: as few copies of it as can be, whatever the load.

Requests of the base model have a home by the beginning of their prompt, or by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.routing.fleet_view import ReplicaView, RoutedRequest
from lora_serve.routing.routers import base


class Router(base.Router):
    """The replica of the highest score first."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[str]:
        key = base.home_key(request)
        return sorted((state.replica for state in replicas), key=lambda replica: base.score(key, replica), reverse=True)
