"""The host tier: adapters in RAM, least recently used out first. Knows nothing of what an adapter is; no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import Generic, TypeVar

from lora_serve.core.errors import AdapterUnavailableError

V = TypeVar("V")


class HostCache(Generic[V]):
    """LRU by bytes and by count, keyed by digest. Owned by one thread (the engine loop), so it has no lock."""

    def __init__(self, max_bytes: int, max_items: int | None = None) -> None:
        """`max_bytes` of all values together; `max_items` values (None: limited by bytes only)."""
        self.max_bytes = max_bytes
        self.max_items = max_items
        self.num_bytes = 0
        self._items: OrderedDict[str, tuple[V, int]] = OrderedDict()  # oldest use first

    def get(self, digest: str) -> V | None:
        """The value, which counts as a use; None if it is not here."""
        item = self._items.get(digest)
        if item is None:
            return None
        self._items.move_to_end(digest)
        return item[0]

    def put(self, digest: str, value: V, num_bytes: int, keep: Set[str] = frozenset()) -> tuple[str, ...]:
        """Store `value`; return the digests evicted for it, oldest use first, those of `keep` only if no other is left.

        Raises AdapterUnavailableError, and changes nothing, if the value alone is over the budget.
        """
        if num_bytes > self.max_bytes:
            raise AdapterUnavailableError(
                f"The adapter needs {num_bytes} bytes of host memory and --adapter-host-memory allows {self.max_bytes}."
            )
        self.drop(digest)
        self._items[digest] = (value, num_bytes)
        self.num_bytes += num_bytes
        return self._evict(keep)

    def drop(self, digest: str) -> bool:
        """Forget the value; False if it was not here."""
        item = self._items.pop(digest, None)
        if item is None:
            return False
        self.num_bytes -= item[1]
        return True

    def bytes_of(self, digest: str) -> int:
        """Bytes of one value, 0 if it is not here; not a use."""
        item = self._items.get(digest)
        return 0 if item is None else item[1]

    @property
    def digests(self) -> tuple[str, ...]:
        """Oldest use first."""
        return tuple(self._items)

    def __contains__(self, digest: object) -> bool:
        """Whether it is here; unlike `get`, not a use."""
        return digest in self._items

    def __len__(self) -> int:
        return len(self._items)

    def _evict(self, keep: Set[str]) -> tuple[str, ...]:
        evicted = []
        while self.num_bytes > self.max_bytes or (self.max_items is not None and len(self._items) > self.max_items):
            digest = next((digest for digest in self._items if digest not in keep), next(iter(self._items)))
            self.drop(digest)
            evicted.append(digest)
        return tuple(evicted)
