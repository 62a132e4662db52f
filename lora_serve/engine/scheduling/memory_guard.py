"""The check that a step fits the device's memory before it is composed; in plain numbers."""

from __future__ import annotations

from collections.abc import Iterable

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.memory import MemoryLoad, MemoryPlan
from lora_serve.core.stats import MemoryStats
from lora_serve.engine.adapters.slots import SlotTable

_STEPS_BEFORE_GROWTH = 16  # that went well, until a limit lowered by lack of memory is raised again
_GROWTH = 1.25


class MemoryGuard:
    """Keeps weights + KV pool + resident adapters + activations(step) <= limit.

    Memory can be short all the same, through fragmentation or other programs: then steps have half as many tokens as
    the one that failed, and a quarter more after every few successful ones, until they are as large again.
    """

    def __init__(self, plan: MemoryPlan, slots: SlotTable) -> None:
        self._plan = plan
        self._slots = slots
        self._max_tokens: int | None = None
        self._failed_tokens = 0
        self._num_well = 0
        self._num_out_of_memory = 0
        self._last = 0
        self._largest = 0

    def max_tokens(self, configured: int) -> int:
        """The most tokens of the next step."""
        return configured if self._max_tokens is None else min(configured, self._max_tokens)

    def fits(self, load: MemoryLoad, adapters: Iterable[AdapterRef]) -> bool:
        """True if a step may be composed that makes these `adapters` resident, if they are not yet."""
        if self._plan.limit is None:
            return True
        newcomers = sum(adapter.num_bytes for adapter in adapters if adapter.digest not in self._slots)
        return self._taken() + newcomers + self._plan.activations.num_bytes(load) <= self._plan.limit

    def composed(self, load: MemoryLoad) -> None:
        """Notes the step that runs next."""
        self._last = self._plan.activations.num_bytes(load)
        self._largest = max(self._largest, self._taken() + self._last)

    def ran_out(self, num_tokens: int) -> None:
        """Notes that the device had no memory for a step of so many tokens."""
        self._num_out_of_memory += 1
        self._num_well = 0
        self._failed_tokens = max(self._failed_tokens, num_tokens)
        self._max_tokens = max(1, num_tokens // 2)

    def ran_well(self) -> None:
        """Notes a step that was computed in one piece."""
        if self._max_tokens is None:
            return
        self._num_well += 1
        if self._num_well % _STEPS_BEFORE_GROWTH == 0:
            self._max_tokens = int(self._max_tokens * _GROWTH) + 1
        if self._max_tokens > self._failed_tokens:
            self._max_tokens, self._failed_tokens = None, 0

    def stats(self) -> MemoryStats:
        plan = self._plan
        return MemoryStats(
            plan.limit,
            plan.weight_bytes,
            plan.kv_bytes,
            self._slots.num_bytes,
            self._last,
            self._largest,
            plan.measured_peak(),
            self._num_out_of_memory,
            self._max_tokens,
        )

    def _taken(self) -> int:
        return self._plan.weight_bytes + self._plan.kv_bytes + self._slots.num_bytes
