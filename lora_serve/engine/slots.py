"""The table of device slots: which adapter owns which index. The bytes are in `model/lora_slots.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.stats import SlotInfo


@dataclass(slots=True)
class _Entry:
    slot: SlotRef
    adapter: AdapterRef
    num_rows: int = 0  # rows that run on it: while there are any, it stays
    is_pinned: bool = False  # by the admin

    @property
    def is_evictable(self) -> bool:
        return self.num_rows == 0 and not self.is_pinned


class SlotTable:
    """LRU over `num_slots` slots and `max_bytes` bytes (None: no limit). A slot in use is never given away."""

    def __init__(self, num_slots: int, max_bytes: int | None = None) -> None:
        self.num_slots = num_slots
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by digest, least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    @property
    def num_bytes(self) -> int:
        return sum(entry.adapter.num_bytes for entry in self._entries.values())

    def acquire(self, digest: str) -> SlotRef:
        """One more row on a resident adapter."""
        entry = self._entries[digest]
        self._entries.move_to_end(digest)
        entry.num_rows += 1
        return entry.slot

    def release(self, slot: SlotRef) -> None:
        """One row less."""
        entry = self._entries[slot.digest]
        assert entry.slot == slot, "a slot of another generation was released"
        assert entry.num_rows > 0, "a slot was released twice"
        entry.num_rows -= 1

    def check_possible(self, adapters: Sequence[AdapterRef]) -> None:
        """Raise AdapterUnavailableError if these can never be here together, however long one waits."""
        wanted = {adapter.digest for adapter in adapters}
        pinned = [entry for digest, entry in self._entries.items() if entry.is_pinned and digest not in wanted]
        if len(pinned) + len(wanted) > self.num_slots:
            raise AdapterUnavailableError(
                f"Of {self.num_slots} device slots (--max-loras) {len(pinned)} hold pinned adapters, and the request "
                f"needs {len(wanted)}; unpin one.",
                retry_after=30,
            )
        pinned_bytes = sum(entry.adapter.num_bytes for entry in pinned)
        num_bytes = sum(adapter.num_bytes for adapter in adapters)
        if self.max_bytes is not None and pinned_bytes + num_bytes > self.max_bytes:
            raise AdapterUnavailableError(
                f"The request's adapters need {num_bytes} bytes of device memory; --adapter-memory allows "
                f"{self.max_bytes}, of which pinned adapters hold {pinned_bytes}.",
                retry_after=30,
            )

    def place(self, adapter: AdapterRef, keep: Set[str] = frozenset()) -> tuple[SlotRef, tuple[SlotRef, ...]] | None:
        """A slot for an adapter that has none, and the slots evicted for it; None: all are in use or in `keep`."""
        assert adapter.digest not in self._entries
        victims = self._victims(adapter, keep)
        if victims is None:
            return None
        evicted = tuple(self.remove(digest) for digest in victims)
        index = self._free.pop()
        self._generations[index] += 1
        slot = SlotRef(index, self._generations[index], adapter.digest)
        self._entries[adapter.digest] = _Entry(slot, adapter)
        return slot, evicted

    def remove(self, digest: str) -> SlotRef:
        """Take an adapter that no row uses out of its slot."""
        entry = self._entries[digest]
        assert entry.num_rows == 0, "a slot in use was evicted"
        del self._entries[digest]
        self._free.append(entry.slot.index)
        return entry.slot

    def set_pinned(self, digest: str, is_pinned: bool) -> None:
        """The admin's pin: never evicted while it is set."""
        self._entries[digest].is_pinned = is_pinned

    def is_pinned(self, digest: str) -> bool:
        """Whether it is here and pinned."""
        return digest in self._entries and self._entries[digest].is_pinned

    def num_rows(self, digest: str) -> int:
        """Rows that run on an adapter now; 0 if it is not here."""
        return self._entries[digest].num_rows if digest in self._entries else 0

    def infos(self) -> Iterator[SlotInfo]:
        """What is where, least recently used first."""
        for digest, entry in self._entries.items():
            slot, adapter = entry.slot, entry.adapter
            yield SlotInfo(
                slot.index, slot.generation, digest, adapter.name, adapter.num_bytes, entry.num_rows, entry.is_pinned
            )

    def _victims(self, adapter: AdapterRef, keep: Set[str]) -> list[str] | None:
        """The fewest, least recently used adapters whose going makes room; None: not enough can go."""
        slots, num_bytes, victims = len(self._free), self.num_bytes, list[str]()
        candidates = (digest for digest, entry in self._entries.items() if entry.is_evictable and digest not in keep)
        while slots == 0 or (self.max_bytes is not None and num_bytes + adapter.num_bytes > self.max_bytes):
            digest = next(candidates, None)
            if digest is None:
                return None
            victims.append(digest)
            slots += 1
            num_bytes -= self._entries[digest].adapter.num_bytes
        return victims
