"""Where adapters are: on the device, in host memory, or being loaded. Never waits for a byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lora_serve.adapters.checkpoint.content import DUMMY_DIGEST
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import AdapterUnavailableError, LoadHangsError, LoraServeError
from lora_serve.core.figures import EvictionReason, TierStats
from lora_serve.core.messages import Resize
from lora_serve.core.stats import AdapterCounters
from lora_serve.core.tenant import TenantBudget
from lora_serve.engine.counters import CacheCounters, LoadEstimate
from lora_serve.engine.host_cache import HostCache
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.slots import SlotTable

V = TypeVar("V")


@dataclass(eq=False)
class AdapterResidency(Generic[V]):
    """The engine's two cache tiers for adapters. Owned by the engine loop; loaders only post `LoadFinished`.

    Requests `want` an adapter from the moment they wait until they end. A wanted adapter leaves host memory last before
    its use, and loads start only as far as host memory can hold all wanted adapters. So there may be many more adapters
    than memory, and the oldest waiting request always makes progress.
    """

    slots: SlotTable
    host: HostCache[V]
    _submit: Callable[[AdapterRef], None]
    _clock: Callable[[], float]
    _recorder: Recorder
    _wanted: Counter[str] = field(default_factory=Counter)
    _protected: frozenset[str] = frozenset()
    _in_flight: dict[str, tuple[AdapterRef, float]] = field(default_factory=dict)  # ref, when it was submitted
    _changes: list[tuple[SlotRef, V | None]] = field(default_factory=list)
    _counters: CacheCounters = field(default_factory=CacheCounters)
    _warm_up_counters: CacheCounters = field(default_factory=CacheCounters)  # not shown
    _estimate: LoadEstimate = field(default_factory=LoadEstimate)
    num_hung_loads: int = 0  # since start
    _load_seconds: dict[str, float] = field(default_factory=dict)  # by digest: adapters that load slowly stay longer
    _extra_bytes: dict[str, int] = field(default_factory=dict)  # of host memory, by digest, where a load found some

    # -- for the scheduler -------------------------------------------------------------------------------------

    def want(self, adapter: AdapterRef) -> None:
        """Counts one more request that needs the adapter, as a hit or a miss of each tier."""
        self._wanted[adapter.digest] += 1
        self._counters_of(adapter.digest).wanted(
            adapter, on_device=adapter.digest in self.slots, on_host=adapter.digest in self.host
        )

    def protect(self, adapters: Sequence[AdapterRef]) -> None:
        """Keeps these adapters, those of the first request in the queue, where they are until it runs; they load first
        too.

        Otherwise two sets of adapters, each half resident, could evict one another for ever.
        """
        self._protected = frozenset(adapter.digest for adapter in adapters)

    def is_protected(self, digest: str) -> bool:
        """True if the adapter may not leave its slot now, though no row uses it."""
        return digest in self._protected

    def unwant(self, digest: str) -> None:
        self._wanted[digest] -= 1
        if self._wanted[digest] <= 0:
            del self._wanted[digest]

    def is_here(self, digest: str) -> bool:
        return digest in self.slots or digest in self.host

    def must_evict(self, adapters: Sequence[AdapterRef]) -> bool:
        """True if another adapter would have to leave the device for one of these."""
        return any(a.digest not in self.slots and not self.slots.has_free(a) for a in adapters)

    def acquire(self, adapters: Sequence[AdapterRef]) -> tuple[SlotRef, ...]:
        """Slots of all `adapters` for one more row, held until `release`; empty if they cannot be had now.

        Raises AdapterUnavailableError if waiting would not help.
        """
        self.slots.check_possible(adapters)
        held: list[SlotRef] = []
        for adapter in adapters:
            if self.slots.is_leaving(adapter.digest):
                break
            if adapter.digest not in self.slots and not self._to_device(adapter):
                break
            held.append(self.slots.acquire(adapter.digest))
        if len(held) == len(adapters):
            for slot in held:
                self.slots.use(slot.digest)
            return tuple(held)
        for slot in held:
            self.release(slot)
        return ()

    def release(self, slot: SlotRef) -> None:
        if self.slots.release(slot):
            reason = EvictionReason.CORRUPT if self.slots.is_empty(slot.digest) else EvictionReason.SHRUNK
            self._drop(self.slots.remove(slot.digest), reason)

    def request(self, adapter: AdapterRef) -> bool:
        """Starts a load unless the adapter is resident or being loaded; False: host memory cannot take it yet."""
        digest = adapter.digest
        if self.is_here(digest) or digest in self._in_flight:
            return True
        if digest not in self._protected and not self._can_load(adapter):
            return False
        self._load(adapter)
        return True

    def retry_after(self, adapters: Sequence[AdapterRef]) -> float:
        """Seconds until these adapters will probably be in host memory."""
        cold = [adapter for adapter in adapters if not self.is_here(adapter.digest)]
        return self._estimate.retry_after(cold, self._in_flight, self._clock())

    def place_if_free(self, adapter: AdapterRef) -> bool:
        """Puts an adapter into a free slot before a row asks for it; True if that was possible."""
        is_possible = adapter.digest not in self.slots and self.slots.has_free(adapter)
        return is_possible and self._to_device(adapter)

    @property
    def has_changes(self) -> bool:
        """True if a slot must be filled or cleared before the next batch."""
        return bool(self._changes)

    def take_changes(self) -> list[tuple[SlotRef, V | None]]:
        """The slots that the runner must fill, or clear (None), before the next batch, in order."""
        changes, self._changes = self._changes, []
        return changes

    # -- messages ----------------------------------------------------------------------------------------------

    def load_finished(self, message: LoadFinished[V]) -> LoraServeError | None:
        """Takes in the result of a load; returns the error if the adapter cannot be had.

        A load that this residency did not start began before the engine was rebuilt, and is ignored.
        """
        if message.digest not in self._in_flight:
            return None
        adapter, submitted = self._in_flight.pop(message.digest)
        self.num_hung_loads += isinstance(message.error, LoadHangsError)
        if message.adapter is None:
            return message.error or AdapterUnavailableError(f"The weights of {adapter.label} cannot be loaded now.")
        if message.extra_bytes:
            self._extra_bytes[message.digest] = message.extra_bytes
        num_bytes = self._needed_on_host(adapter)
        try:
            evicted = self.host.put(
                message.digest, message.adapter, num_bytes, adapter.tenant, message.seconds, self._reluctance
            )
        except AdapterUnavailableError as error:
            return error
        self._estimate.learn(adapter.num_bytes, message.seconds)
        self._load_seconds[message.digest] = message.seconds
        self._left_host(evicted, EvictionReason.CAPACITY)
        self._counters_of(message.digest).arrived_on_host(message.digest, self._clock() - submitted, message.times)
        tier = "none" if message.times is None else message.times.tier
        self._recorder.moved(message.digest, tier, "host", message.seconds, adapter)
        return None

    def copied(self, slot: SlotRef, seconds: float) -> None:
        self._counters_of(slot.digest).copied(slot.digest, seconds)
        self._recorder.moved(slot.digest, "host", "device", seconds)

    def not_copied(self, slot: SlotRef) -> None:
        """Gives up a slot whose copy failed: its rows are refused, and the next request tries another slot."""
        if self.slots.give_up(slot):
            self._drop(self.slots.remove(slot.digest), EvictionReason.CORRUPT)

    def prefetch(self, adapter: AdapterRef, *, pin: bool = False) -> bool:
        """Moves an adapter towards the device; True once it is there (and pinned, if asked). Raises
        AdapterUnavailableError.

        Reaching the device counts as a use, so that the next prefetched adapter does not evict it as the oldest.
        """
        self.slots.check_possible([adapter])
        if adapter.digest in self.slots:
            self.slots.use(adapter.digest)
        elif not self._to_device(adapter):
            self.request(adapter)
            return False
        if pin:
            self._set_pinned(adapter.digest, True)
        return True

    def prefetch_to_host(self, adapter: AdapterRef) -> bool:
        """Moves an adapter towards host memory; True once it is there or on the device."""
        return adapter.digest in self.slots or self.fetched(adapter) is not None

    def fetched(self, adapter: AdapterRef) -> V | None:
        """The adapter's weights in host memory; None, and a load under way, if they are not there."""
        value = self.host.get(adapter.digest)
        if value is None and adapter.digest not in self._in_flight and self._can_load(adapter):
            self._load(adapter)
        return value

    def unpin(self, digest: str) -> None:
        if digest in self.slots:
            self._set_pinned(digest, False)

    def evict(self, digest: str, *, forget: bool = False) -> bool:
        """Evicts an adapter from both tiers, its figures too with `forget`; False while a request wants it or it is
        loading.

        A pinned adapter stays: another name of the same content may be pinned.
        """
        if self.slots.is_pinned(digest):
            return True
        if self._wanted[digest] or digest in self._in_flight:
            return False
        reason = EvictionReason.DELETED if forget else EvictionReason.ADMIN
        if self.host.drop(digest):
            self._left_host((digest,), reason)
        if digest in self.slots:
            self._drop(self.slots.remove(digest), reason)
        if forget:
            self._counters_of(digest).forget(digest)
            self._load_seconds.pop(digest, None)
            self._extra_bytes.pop(digest, None)
        return True

    def resize(self, command: Resize) -> None:
        """Sets new limits; slots in use are emptied once their rows have ended. Raises ConflictError, and changes
        nothing, if the pinned adapters would not fit.
        """
        num_slots = self.slots.num_slots if command.max_loras is None else command.max_loras
        device_bytes = self.slots.max_bytes if command.adapter_memory is None else command.adapter_memory
        host_bytes = self.host.max_bytes if command.adapter_host_memory is None else command.adapter_host_memory
        host_items = self.host.max_items if command.max_cpu_loras is None else command.max_cpu_loras
        for slot in self.slots.resize(num_slots, device_bytes):
            self._drop(slot, EvictionReason.SHRUNK)
        self._left_host(self.host.resize(host_bytes, host_items, self._reluctance), EvictionReason.SHRUNK)

    def set_budgets(self, budgets: Sequence[TenantBudget]) -> None:
        """Sets what each tenant may have on the device; adapters beyond that leave, at once or with their last row."""
        for slot in self.slots.set_budgets(budgets):
            self._drop(slot, EvictionReason.SHRUNK)

    # -- figures -----------------------------------------------------------------------------------------------

    @property
    def loading(self) -> tuple[AdapterRef, ...]:
        """The adapters on their way to host memory."""
        return tuple(ref for ref, _ in self._in_flight.values())

    def counters(self) -> dict[str, AdapterCounters]:
        return self._counters.adapters()

    def tiers(self) -> dict[str, TierStats]:
        return {
            "device": self._counters.device.frozen(len(self.slots), self.slots.num_bytes, self.slots.max_bytes),
            "host": self._counters.host.frozen(len(self.host), self.host.num_bytes, self.host.max_bytes),
        }

    # ----------------------------------------------------------------------------------------------------------

    def _counters_of(self, digest: str) -> CacheCounters:
        return self._warm_up_counters if digest == DUMMY_DIGEST else self._counters

    def _load(self, adapter: AdapterRef) -> None:
        self._in_flight[adapter.digest] = (adapter, self._clock())
        self._submit(adapter)

    def _to_device(self, adapter: AdapterRef) -> bool:
        """Places an adapter from host memory into a slot; False if it is not in host memory or no slot can be had."""
        if adapter.digest not in self.host:
            return False
        placed = self.slots.place(adapter, self._protected, self._load_seconds.get(adapter.digest, 0.0))
        if placed is None:
            return False
        slot, evicted = placed
        for victim in evicted:
            self._drop(victim, EvictionReason.CAPACITY)
        self._changes.append((slot, self.host.get(adapter.digest)))
        self._counters_of(adapter.digest).placed_on_device()
        return True

    def _drop(self, slot: SlotRef, reason: EvictionReason) -> None:
        self._changes.append((slot, None))
        self._counters_of(slot.digest).left_device(slot.digest, reason)
        self._recorder.moved(slot.digest, "device", "none")

    def _left_host(self, digests: Sequence[str], reason: EvictionReason) -> None:
        for digest in digests:
            self._counters_of(digest).left_host(reason)
            self._recorder.moved(digest, "host", "none")

    def _set_pinned(self, digest: str, is_pinned: bool) -> None:
        for slot in self.slots.set_pinned(digest, is_pinned):
            self._drop(slot, EvictionReason.SHRUNK)

    def _reluctance(self, digest: str) -> int:
        """Eviction order of host memory: adapters that wait for their first use leave late, protected ones last."""
        return 2 if digest in self._protected else int(digest in self._wanted)

    def _can_load(self, adapter: AdapterRef) -> bool:
        """True if host memory can hold it beside all wanted adapters that are not on the device yet, floors kept."""
        coming = [self._needed_on_host(ref) for ref, _ in self._in_flight.values()]
        wanted = frozenset(digest for digest in self._wanted if digest in self.host and digest not in self.slots)
        if not coming and not wanted:
            return True
        needed = self._needed_on_host(adapter)
        return self.host.has_room(adapter.tenant, needed, wanted, sum(coming), len(coming))

    def _needed_on_host(self, adapter: AdapterRef) -> int:
        return adapter.num_bytes + self._extra_bytes.get(adapter.digest, 0)
