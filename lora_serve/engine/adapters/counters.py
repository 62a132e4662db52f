"""Hits, misses, loads and evictions, per tier and per adapter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from lora_serve.adapters.tier_counts import TierCounts
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.stats import AdapterCounters, EvictionReason, LoadTimes

_MAX_NAMES = 1024  # ids of one content, of which most are no more: their figures begin anew


@dataclass(slots=True)
class _AdapterCounts:
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    load_seconds: float = 0.0  # of its last load
    last_load: LoadTimes | None = None
    evictions: Counter[EvictionReason] = field(default_factory=Counter)
    last_eviction: EvictionReason | None = None

    def frozen(self) -> AdapterCounters:
        return AdapterCounters(
            dict(self.hits),
            dict(self.misses),
            self.loads,
            self.evictions.total(),
            self.load_seconds,
            dict(self.evictions),
            self.last_eviction,
            self.last_load,
        )


class CacheCounters:
    """Hits, misses, loads and evictions as `residency.py` reports them."""

    def __init__(self) -> None:
        self.device = TierCounts()
        self.host = TierCounts()
        self._adapters: dict[str, _AdapterCounts] = {}
        self._frozen: dict[str, AdapterCounters] = {}
        self._changed: set[str] = set()  # digests whose figures are newer than the frozen ones

    def wanted(self, adapter: AdapterRef, *, on_device: bool, on_host: bool) -> None:
        """Counts a request's first look at its adapter in both tiers."""
        own = self._of(adapter.digest)
        counts = own.hits if on_device else own.misses
        if len(counts) >= _MAX_NAMES:
            counts.clear()
        counts[adapter.name] += 1
        if on_device:
            self.device.hits += 1
            return
        self.device.misses += 1
        if on_host:
            self.host.hits += 1
        else:
            self.host.misses += 1

    def arrived_on_host(self, digest: str, seconds: float, times: LoadTimes | None = None) -> None:
        """Counts a load that took `seconds` from its request on."""
        self.host.loaded(seconds)
        own = self._of(digest)
        own.loads += 1
        own.load_seconds, own.last_load = seconds, times

    def copied(self, digest: str, seconds: float) -> None:
        """Notes that the copy into a slot took the engine's thread `seconds`."""
        own = self._adapters.get(digest)
        if own is not None and own.last_load is not None:
            own.last_load = replace(own.last_load, copy=seconds)
            self._changed.add(digest)

    def placed_on_device(self) -> None:
        self.device.loaded(0.0)

    def left_device(self, digest: str, reason: EvictionReason) -> None:
        self.device.evictions[reason] += 1
        own = self._of(digest)
        own.evictions[reason] += 1
        own.last_eviction = reason

    def left_host(self, reason: EvictionReason) -> None:
        self.host.evictions[reason] += 1

    def forget(self, digest: str) -> None:
        """Drops the figures of a deleted adapter, so that they do not pile up."""
        self._adapters.pop(digest, None)
        self._frozen.pop(digest, None)

    def adapters(self) -> dict[str, AdapterCounters]:
        """The figures of every adapter; only those that changed since the last call are worked out."""
        for digest in self._changed & self._adapters.keys():
            self._frozen[digest] = self._adapters[digest].frozen()
        self._changed.clear()
        return dict(self._frozen)

    def _of(self, digest: str) -> _AdapterCounts:
        self._changed.add(digest)
        return self._adapters.setdefault(digest, _AdapterCounts())
