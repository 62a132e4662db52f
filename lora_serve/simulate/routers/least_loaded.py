"""The replica with the fewest requests under way, whatever adapters are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lora_serve.simulate.routers import base


class Router(base.Router):
    """Equally loaded replicas take turns."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._turn = 0

    def choose(self, digest: str, loads: Sequence[int], holds: Callable[[int, str], bool]) -> int:
        self._turn = (self._turn + 1) % self.num_replicas
        return min(range(self.num_replicas), key=lambda replica: (loads[replica], (replica - self._turn) % len(loads)))
