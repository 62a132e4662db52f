"""One fixed replica per adapter: as few copies of it as can be, whatever the load.

Rendezvous hashing (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lora_serve.simulate.routers import base


class Router(base.Router):
    """The replica of the highest score."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._homes: dict[str, int] = {}

    def choose(self, digest: str, loads: Sequence[int], holds: Callable[[int, str], bool]) -> int:
        if digest not in self._homes:
            self._homes[digest] = max(range(self.num_replicas), key=lambda replica: base.score(digest, replica))
        return self._homes[digest]
