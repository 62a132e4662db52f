"""The state that a rebuilt engine is brought back to: limits, pins, and the adapters in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TypeVar

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.messages import AdapterCommand, Evict, Pin, Prefetch, Resize, SetTenantBudgets, Tune, Unpin

C = TypeVar("C", Resize, Tune)


class DesiredState:
    """Owned by one thread. Pins, and the adapters of the latest requests, `max_recent` of them at most."""

    def __init__(self, max_recent: int) -> None:
        self._max_recent = max_recent
        self._resize = Resize()
        self._tune = Tune()
        self._budgets = SetTenantBudgets(())
        self._pinned: dict[str, AdapterRef] = {}
        self._recent: OrderedDict[str, AdapterRef] = OrderedDict()  # by digest, the latest last

    def use(self, adapters: Iterable[AdapterRef]) -> None:
        """Notes a request for these adapters."""
        for adapter in adapters:
            self._recent[adapter.digest] = adapter
            self._recent.move_to_end(adapter.digest)
        while len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)

    def note(self, command: AdapterCommand) -> None:
        """Notes a command that the engine has carried out."""
        match command:
            case Pin(adapter):
                self._pinned[adapter.digest] = adapter
            case Unpin(digest):
                self._pinned.pop(digest, None)
            case Evict(digest):
                self._recent.pop(digest, None)
            case Resize():
                self._resize = _merged(self._resize, command)
                self._max_recent = command.max_loras or self._max_recent
            case Tune():
                self._tune = _merged(self._tune, command)
            case SetTenantBudgets():
                self._budgets = command

    def limits(self) -> list[AdapterCommand]:
        """The commands that restore the limits; they come first and are done at once."""
        orders: tuple[tuple[AdapterCommand, AdapterCommand], ...] = (
            (self._resize, Resize()),
            (self._tune, Tune()),
            (self._budgets, SetTenantBudgets(())),
        )
        return [order for order, nothing in orders if order != nothing]

    def residents(self) -> list[AdapterCommand]:
        """The commands that restore pins and recently used adapters; each takes a load."""
        recent = [adapter for digest, adapter in reversed(self._recent.items()) if digest not in self._pinned]
        room = max(0, self._max_recent - len(self._pinned))
        return [*map(Pin, self._pinned.values()), *map(Prefetch, recent[:room])]


def _merged(before: C, after: C) -> C:
    return replace(before, **{name: value for name, value in asdict(after).items() if value is not None})
