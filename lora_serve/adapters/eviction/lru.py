"""Evicts the least recently used entry, whatever its size and earlier uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Policy:
    """See `EvictionPolicy`."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()  # oldest use first

    def add(self, key: str, num_bytes: int, load_seconds: float) -> None:
        assert key not in self._keys, "a key was added twice"
        self._keys[key] = None

    def use(self, key: str) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: str) -> None:
        del self._keys[key]

    def evict(self, key: str) -> None:
        del self._keys[key]

    def order(self) -> Iterator[str]:
        return iter(self._keys)
