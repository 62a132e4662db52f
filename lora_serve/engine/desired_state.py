"""The commands that an engine built anew has to be given again: limits, pins, and the adapters in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import asdict, replace

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.messages import AdapterCommand, Evict, Pin, Prefetch, Resize, SetTenantBudgets, Tune, Unpin

C = TypeVar("C", Resize, Tune)


class DesiredState:
    """Limits, pins, and the adapters of the latest requests, `max_recent` of them at most. Owned by one thread."""

    def __init__(self, max_recent: int) -> None:
        self._max_recent = max_recent
        self._resize = Resize()
        self._tune = Tune()
        self._budgets = SetTenantBudgets(())
        self._pinned: dict[str, AdapterRef] = {}
        self._recent: OrderedDict[str, AdapterRef] = OrderedDict()  # by digest, the latest last

    def use(self, adapters: Iterable[AdapterRef]) -> None:
        """Note the adapters of a request."""
        for adapter in adapters:
            self._recent[adapter.digest] = adapter
            self._recent.move_to_end(adapter.digest)
        while len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)

    def note(self, command: AdapterCommand) -> None:
        """Note a command that the engine has done."""
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
        """The commands to be given first; each is done at once."""
        limits: tuple[AdapterCommand, ...] = (self._resize, self._tune, self._budgets)
        return [limit for limit in limits if limit not in (Resize(), Tune(), SetTenantBudgets(()))]

    def residents(self) -> list[AdapterCommand]:
        """The commands to be given next; each takes a load."""
        recent = [adapter for digest, adapter in reversed(self._recent.items()) if digest not in self._pinned]
        num_left = max(0, self._max_recent - len(self._pinned))
        return [*map(Pin, self._pinned.values()), *map(Prefetch, recent[:num_left])]


def _merged(before: C, after: C) -> C:
    return replace(before, **{name: value for name, value in asdict(after).items() if value is not None})
