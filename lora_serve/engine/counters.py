"""Hits, misses, loads and evictions, per tier and per adapter; the expected time of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lora_serve.adapters.stores.base import TierCounts
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.figures import EvictionReason, LoadTimes
from lora_serve.core.stats import AdapterCounters

MIN_RETRY_AFTER = 1.0  # seconds
MAX_RETRY_AFTER = 120.0
UNKNOWN_SECONDS = 1.0  # before anything was learned
_MAX_NAMES = 1024  # ids of one content, of which most are no more: their figures begin anew
_WEIGHT = 0.2  # of the newest load


class CacheCounters:
    """Hits, misses, loads and evictions as `residency.py` reports them."""

    def __init__(self) -> None:
        self.device = TierCounts()
        self.host = TierCounts()
        self._adapters: dict[str, AdapterCounters] = {}

    def wanted(self, adapter: AdapterRef, *, on_device: bool, on_host: bool) -> None:
        """Counts a request's first look at its adapter in both tiers."""
        own = self._of(adapter.digest)
        counts = own.hits if on_device else own.misses
        counts = {} if len(counts) >= _MAX_NAMES else counts
        counts = {**counts, adapter.name: counts.get(adapter.name, 0) + 1}
        if on_device:
            self.device.hits += 1
            self._adapters[adapter.digest] = replace(own, hits=counts)
            return
        self.device.misses += 1
        self._adapters[adapter.digest] = replace(own, misses=counts)
        if on_host:
            self.host.hits += 1
        else:
            self.host.misses += 1

    def arrived_on_host(self, digest: str, seconds: float, times: LoadTimes | None) -> None:
        """Counts a load that took `seconds` from its request on."""
        self.host.loaded(seconds)
        own = self._of(digest)
        self._adapters[digest] = replace(own, loads=own.loads + 1, load_seconds=seconds, last_load=times)

    def copied(self, digest: str, seconds: float) -> None:
        """Notes that the copy into a slot took the engine's thread `seconds`."""
        own = self._of(digest)
        if own.last_load is not None:
            self._adapters[digest] = replace(own, last_load=replace(own.last_load, copy=seconds))

    def placed_on_device(self) -> None:
        self.device.loaded(0.0)

    def left_device(self, digest: str, reason: EvictionReason) -> None:
        self.device.evictions[reason] += 1
        own = self._of(digest)
        reasons = {**own.eviction_reasons, reason: own.eviction_reasons.get(reason, 0) + 1}
        self._adapters[digest] = replace(
            own, evictions=own.evictions + 1, eviction_reasons=reasons, last_eviction=reason
        )

    def left_host(self, reason: EvictionReason) -> None:
        self.host.evictions[reason] += 1

    def forget(self, digest: str) -> None:
        """Drops the figures of a deleted adapter, so that they do not pile up."""
        self._adapters.pop(digest, None)

    def adapters(self) -> dict[str, AdapterCounters]:
        """The figures of every adapter."""
        return self._adapters.copy()

    def _of(self, digest: str) -> AdapterCounters:
        return self._adapters.get(digest) or AdapterCounters()


class LoadEstimate:
    """seconds = per_load + per_byte * bytes, by least squares over past loads with exponentially falling weights.

    Four weighted means (of bytes, seconds, bytes^2, bytes * seconds) suffice for the fit. Where all loads were equally
    large, or a fit would have a negative part, one of the two coefficients explains everything.
    """

    def __init__(self) -> None:
        self._means: tuple[float, float, float, float] | None = None

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Learns from a load of `num_bytes` bytes that took `seconds`, the wait for a thread not counted."""
        sample = (float(num_bytes), seconds, float(num_bytes) ** 2, num_bytes * seconds)
        if self._means is None:
            self._means = sample
            return
        x, y, xx, xy = (old + _WEIGHT * (new - old) for old, new in zip(self._means, sample, strict=True))
        self._means = (x, y, xx, xy)

    def seconds(self, num_bytes: int) -> float:
        if self._means is None:
            return UNKNOWN_SECONDS
        x, y, xx, xy = self._means
        variance = xx - x * x
        slope = max(0.0, (xy - x * y) / variance) if variance > 1e-9 * xx else 0.0
        per_load = y - slope * x
        if per_load < 0:
            slope, per_load = y / x, 0.0
        return per_load + slope * num_bytes

    def retry_after(
        self, adapters: Sequence[AdapterRef], in_flight: Mapping[str, tuple[AdapterRef, float]], now: float
    ) -> float:
        """Seconds, 1 to 120, until all of `adapters` are in host memory, the loads queued before them included.

        `in_flight`: loads under way and their start, oldest first. A load that takes longer than expected is expected
        to take as long again.
        """
        wanted = {adapter.digest: adapter for adapter in adapters}
        loads = list(in_flight.values())
        if wanted.keys() <= in_flight.keys():  # later loads do not delay them
            last = max((list(in_flight).index(digest) for digest in wanted), default=-1)
            loads = loads[: last + 1]
        total = sum(self._left(adapter, now - since) for adapter, since in loads)
        total += sum(self.seconds(ref.num_bytes) for digest, ref in wanted.items() if digest not in in_flight)
        return min(max(total, MIN_RETRY_AFTER), MAX_RETRY_AFTER)

    def _left(self, adapter: AdapterRef, elapsed: float) -> float:
        expected = self.seconds(adapter.num_bytes)
        return expected - elapsed if elapsed < expected else elapsed
