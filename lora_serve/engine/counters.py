"""Hits, misses, loads and evictions, per tier and per adapter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lora_serve.core.load_times import LoadTimes
from lora_serve.core.stats import AdapterCounters, TierStats


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    load_seconds: float = 0.0  # of a tier: summed; of an adapter: of its last load
    last_load: LoadTimes | None = None  # of an adapter


class CacheCounters:
    """What `residency.py` saw happen."""

    def __init__(self) -> None:
        self._device = _Counts()
        self._host = _Counts()
        self._adapters: dict[str, _Counts] = {}

    def wanted(self, digest: str, *, on_device: bool, on_host: bool) -> None:
        """A sequence needs it."""
        own = self._of(digest)
        if on_device:
            self._device.hits += 1
            own.hits += 1
            return
        self._device.misses += 1
        own.misses += 1
        if on_host:
            self._host.hits += 1
        else:
            self._host.misses += 1

    def arrived_on_host(self, digest: str, seconds: float, num_evicted: int, times: LoadTimes | None = None) -> None:
        """A load is done; it took `seconds` from its request and pushed others out."""
        self._host.loads += 1
        self._host.load_seconds += seconds
        self._host.evictions += num_evicted
        own = self._of(digest)
        own.loads += 1
        own.load_seconds = seconds
        own.last_load = times

    def copied(self, digest: str, seconds: float) -> None:
        """It was copied into a slot, which took the engine's thread `seconds`."""
        own = self._adapters.get(digest)
        if own is not None and own.last_load is not None:
            own.last_load = dataclasses.replace(own.last_load, copy=seconds)

    def placed_on_device(self) -> None:
        """A slot was given to it."""
        self._device.loads += 1

    def left_device(self, digest: str) -> None:
        """Its slot was taken away."""
        self._device.evictions += 1
        self._of(digest).evictions += 1

    def forget(self, digest: str) -> None:
        """It is gone for good: the figures of deleted adapters do not pile up."""
        self._adapters.pop(digest, None)

    def adapters(self) -> dict[str, AdapterCounters]:
        """Per digest."""
        return {
            digest: AdapterCounters(own.hits, own.misses, own.loads, own.evictions, own.load_seconds, own.last_load)
            for digest, own in self._adapters.items()
        }

    def device(self, num_bytes: int, budget: int | None) -> TierStats:
        """The device tier; `budget` in bytes, None: no limit."""
        return _frozen(self._device, num_bytes, budget)

    def host(self, num_bytes: int, budget: int | None) -> TierStats:
        """The host tier."""
        return _frozen(self._host, num_bytes, budget)

    def _of(self, digest: str) -> _Counts:
        return self._adapters.setdefault(digest, _Counts())


def _frozen(counts: _Counts, num_bytes: int, budget: int | None) -> TierStats:
    return TierStats(
        counts.hits, counts.misses, counts.loads, counts.evictions, counts.load_seconds, num_bytes, budget or 0
    )
