"""The table of device slots: which adapter owns which index. The bytes are in `model/lora/lora_slots.py`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Residents
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import AdapterUnavailableError, ConflictError, DeviceQuotaError
from lora_serve.core.stats import SlotInfo
from lora_serve.core.tenant import TenantBudget

SMOKE_TEST_SLOT = 0  # the smoke tests' own, so that no adapter has to leave for one; adapters have 1, 2, 3, ...


@dataclass(slots=True)
class _SlotEntry:
    slot: SlotRef
    adapter: AdapterRef
    num_rows: int = 0  # rows that run on it: while there are any, it stays
    is_pinned: bool = False  # by the admin
    is_leaving: bool = False  # the table, or its owner's maximum, shrank: no new row, and it goes with its last one
    is_empty: bool = False  # the copy of its weights failed: likewise, pinned or not

    @property
    def is_evictable(self) -> bool:
        return self.num_rows == 0 and not self.is_pinned


class SlotTable:
    """At most `num_slots` adapters of `max_bytes` bytes together (None: no limit). A slot in use is never given away.

    Both limits change at run time with `resize`. The lowest free index is given out first, so that the pool of slots
    grows only with use.
    """

    def __init__(
        self, num_slots: int, max_bytes: int | None = None, policy: str = "lru", tenant_floor: float = 0.0
    ) -> None:
        """`policy`: name of a file in adapters/eviction. `tenant_floor`: see `Residents`."""
        self._num_slots = num_slots
        self._residents = Residents(create_policy(policy), max_bytes, num_slots, tenant_floor)
        self._has_budgets = False
        self._entries: dict[str, _SlotEntry] = {}  # by digest
        self._evictable: set[str] = set()  # kept up to date, as many waiting rows look for one at every step
        self._free: list[int] = []  # a heap of indices that were given back
        self._generations: list[int] = [0]  # by index; SMOKE_TEST_SLOT's is not used

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_indices(self) -> int:
        """The number of indices given out so far, the smoke tests' own included."""
        return len(self._generations)

    @property
    def max_bytes(self) -> int | None:
        return self._residents.max_bytes

    @property
    def num_bytes(self) -> int:
        return self._residents.num_bytes

    def acquire(self, digest: str) -> SlotRef:
        entry = self._entries[digest]
        entry.num_rows += 1
        self._evictable.discard(digest)
        return entry.slot

    def use(self, digest: str) -> None:
        """Notes a use, which keeps the adapter resident for longer."""
        self._residents.use(digest)

    def release(self, slot: SlotRef) -> bool:
        """Counts one row less; True if the adapter is leaving and may go now."""
        entry = self._entries[slot.digest]
        assert entry.slot == slot, "a slot of another generation was released"
        assert entry.num_rows > 0, "a slot was released twice"
        entry.num_rows -= 1
        self._note(slot.digest)
        return entry.num_rows == 0 and (entry.is_empty or (entry.is_leaving and not entry.is_pinned))

    def give_up(self, slot: SlotRef) -> bool:
        """Marks a slot whose weights could not be copied, so that no new row takes it; True if no row holds it."""
        entry = self._entries.get(slot.digest)
        if entry is None or entry.slot != slot:
            return False
        entry.is_empty = True
        return entry.num_rows == 0

    def is_leaving(self, digest: str) -> bool:
        """True if the adapter takes no new rows: the table shrank, or its copy failed."""
        entry = self._entries.get(digest)
        return entry is not None and (entry.is_leaving or entry.is_empty)

    def is_empty(self, digest: str) -> bool:
        """True if the copy of its weights failed."""
        return digest in self._entries and self._entries[digest].is_empty

    def check_possible(self, adapters: Sequence[AdapterRef]) -> None:
        """Raises AdapterUnavailableError (DeviceQuotaError for a tenant's budget) if these adapters can never be
        resident together, however long a request waits.
        """
        self._check_budgets(adapters)
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

    def has_free(self, adapter: AdapterRef) -> bool:
        """True if a non-resident adapter could be placed without evicting another."""
        fits = self.max_bytes is None or self.num_bytes + adapter.num_bytes <= self.max_bytes
        return len(self._entries) < self.num_slots and fits and not self.exceeds_tenant_maximum((adapter,))

    def exceeds_tenant_maximum(self, adapters: Sequence[AdapterRef]) -> bool:
        """True if an owner of these is at its own maximum, so that evicting others' adapters would not help."""
        missing = _bytes_by_tenant(adapter for adapter in adapters if adapter.digest not in self._entries)
        return any(self._residents.exceeds_maximum(tenant, num_bytes) for tenant, num_bytes in missing.items())

    def set_budgets(self, budgets: Sequence[TenantBudget]) -> tuple[SlotRef, ...]:
        """Sets the budgets of all tenants that have one. Returns the slots emptied at once; slots in use follow with
        their last row, as after `resize`.
        """
        self._has_budgets = bool(budgets)
        self._residents.set_budgets(budgets)
        return self._plan_departures()

    def first_to_finish(self, adapters: Sequence[AdapterRef], num_steps_left: Mapping[str, int]) -> frozenset[str]:
        """The adapters that have to leave so that these can come: the fewest, whose rows end first.

        `num_steps_left`: by digest of the adapters in use, the steps until their last row ends.
        """
        missing = [adapter for adapter in adapters if adapter.digest not in self._entries]
        wanted = {adapter.digest for adapter in adapters}
        others = [digest for digest, entry in self._entries.items() if not entry.is_pinned and digest not in wanted]
        num_slots = len(self._entries) + len(missing) - self._num_slots
        num_bytes = self.num_bytes + sum(adapter.num_bytes for adapter in missing)
        chosen: list[str] = []
        for digest in sorted(others, key=lambda digest: num_steps_left.get(digest, 0)):
            if num_slots <= 0 and (self.max_bytes is None or num_bytes <= self.max_bytes):
                break
            chosen.append(digest)
            num_slots -= 1
            num_bytes -= self._entries[digest].adapter.num_bytes
        return frozenset(chosen)

    def place(
        self, adapter: AdapterRef, keep: Set[str] = frozenset(), load_seconds: float = 0.0
    ) -> tuple[SlotRef, tuple[SlotRef, ...]] | None:
        """A slot for a non-resident adapter and the slots evicted for it; None: all are in use or in `keep`.

        `load_seconds`: the cost of loading it again, 0 if unknown.
        """
        assert adapter.digest not in self._entries
        if self._evictable <= keep and not self.has_free(adapter):
            return None

        def reluctance(digest: str) -> int | None:
            return 0 if self._entries[digest].is_evictable and digest not in keep else None

        victims = self._residents.victims(adapter.tenant, adapter.num_bytes, reluctance)
        if victims is None:
            return None
        evicted = tuple(self.remove(digest, for_room=True) for digest in victims)
        slot = self._new_slot(adapter.digest)
        self._entries[adapter.digest] = _SlotEntry(slot, adapter)
        self._note(adapter.digest)
        self._residents.add(adapter.digest, adapter.tenant, adapter.num_bytes, load_seconds)
        return slot, evicted

    def remove(self, digest: str, *, for_room: bool = False) -> SlotRef:
        """Takes an adapter that no row uses out of its slot."""
        entry = self._entries[digest]
        assert entry.num_rows == 0, "a slot in use was evicted"
        del self._entries[digest]
        self._evictable.discard(digest)
        self._residents.remove(digest, for_room=for_room)
        heapq.heappush(self._free, entry.slot.index)
        return entry.slot

    def resize(self, num_slots: int, max_bytes: int | None) -> tuple[SlotRef, ...]:
        """Sets new limits, at once for newcomers; returns the slots that were emptied for them.

        Where idle adapters do not suffice, adapters in use are marked: they take no new rows and leave with their last
        one. Raises ConflictError, and changes nothing, if the pinned adapters alone would not fit.
        """
        self._check_pinned_fit(num_slots, max_bytes)
        self._num_slots = self._residents.max_items = num_slots
        self._residents.max_bytes = max_bytes
        return self._plan_departures()

    def set_pinned(self, digest: str, is_pinned: bool) -> tuple[SlotRef, ...]:
        """Sets the admin's pin, which forbids eviction. Returns the slots emptied, if the table was too full."""
        self._entries[digest].is_pinned = is_pinned
        self._note(digest)
        return self._plan_departures()

    def is_pinned(self, digest: str) -> bool:
        return digest in self._entries and self._entries[digest].is_pinned

    def num_rows(self, digest: str) -> int:
        """Rows that run on an adapter now; 0 if it is not resident."""
        return self._entries[digest].num_rows if digest in self._entries else 0

    def residents(self) -> Iterator[tuple[SlotRef, AdapterRef, int, bool]]:
        """Each slot in use: its adapter, the rows that hold it, and whether it is pinned."""
        for entry in self._entries.values():
            yield entry.slot, entry.adapter, entry.num_rows, entry.is_pinned

    def infos(self) -> Iterator[SlotInfo]:
        for entry in sorted(self._entries.values(), key=lambda entry: entry.slot.index):
            slot, adapter = entry.slot, entry.adapter
            yield SlotInfo(
                slot.index, slot.generation, slot.digest, adapter.name, adapter.num_bytes, entry.num_rows,
                entry.is_pinned,
            )  # fmt: skip

    def _check_budgets(self, adapters: Sequence[AdapterRef]) -> None:
        if not self._has_budgets:
            return
        wanted = {adapter.digest: adapter for adapter in adapters}
        pinned = [entry.adapter for key, entry in self._entries.items() if entry.is_pinned and key not in wanted]
        pinned_bytes, needed = _bytes_by_tenant(pinned), _bytes_by_tenant(wanted.values())
        for tenant, num_bytes in needed.items():
            at_most, held = self._residents.maximum(tenant), pinned_bytes.get(tenant, 0)
            if at_most is not None and held + num_bytes > at_most:
                raise DeviceQuotaError(
                    f"The request's adapters need {num_bytes} bytes of device memory; their owner may have {at_most} "
                    f"there (device_bytes_max), of which its pinned adapters hold {held}.",
                    retry_after=30,
                )
        others = self._residents.guaranteed_to_others(needed)
        if self.max_bytes is not None and others + sum(needed.values()) > self.max_bytes:
            raise AdapterUnavailableError(
                "The request's adapters do not fit on the device beside what is guaranteed to others.", retry_after=30
            )

    def _note(self, digest: str) -> None:
        (self._evictable.add if self._entries[digest].is_evictable else self._evictable.discard)(digest)

    def _new_slot(self, digest: str) -> SlotRef:
        index = heapq.heappop(self._free) if self._free else len(self._generations)
        if index == len(self._generations):
            self._generations.append(0)
        self._generations[index] += 1
        return SlotRef(index, self._generations[index], digest)

    def _plan_departures(self) -> tuple[SlotRef, ...]:
        """Empties idle slots that are too many, and marks those in use that must follow."""

        def reluctance(digest: str) -> int | None:
            entry = self._entries[digest]
            return None if entry.is_pinned else int(entry.num_rows > 0)

        surplus = self._residents.surplus(reluctance)
        for digest, entry in self._entries.items():
            entry.is_leaving = digest in surplus
        idle = [digest for digest in surplus if self._entries[digest].is_evictable]
        return tuple(self.remove(digest, for_room=True) for digest in idle)

    def _check_pinned_fit(self, num_slots: int, max_bytes: int | None) -> None:
        pinned = [entry.adapter for entry in self._entries.values() if entry.is_pinned]
        num_bytes = sum(adapter.num_bytes for adapter in pinned)
        if len(pinned) > num_slots or (max_bytes is not None and num_bytes > max_bytes):
            raise ConflictError(
                f"{len(pinned)} pinned adapters of {num_bytes} bytes are on the device, which the new limits would not "
                "hold; unpin some first."
            )


def _bytes_by_tenant(adapters: Iterable[AdapterRef]) -> Counter[str]:
    num_bytes: Counter[str] = Counter()
    for adapter in adapters:
        num_bytes[adapter.tenant] += adapter.num_bytes
    return num_bytes
