"""The figures of one tier of the adapter cache. Without settings: commands that only look at a store need none."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from lora_serve.core.figures import COUNTS, HELD, Count, MetricName, Seconds
from lora_serve.core.live import LiveTier


class EvictionReason(enum.StrEnum):
    """The reason for which an adapter left a tier."""

    CAPACITY = "capacity"  # a newcomer needed the room
    ADMIN = "admin"  # asked for by the admin API
    DELETED = "deleted"  # nothing names it any more
    SHRUNK = "shrunk"  # the tier's budget, or its owner's maximum, was made smaller
    CORRUPT = "corrupt"  # its bytes were not what its digest says


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """One load of an adapter's weights, in seconds, waiting for a thread not counted."""

    tier: str  # where the bytes came from: "disk", "redis", ...; "none": they were made here
    fetch: float = 0.0  # files onto this machine, bytes into memory
    verify: float = 0.0  # their digests
    parse: float = 0.0  # to tensors, checked against the base
    fold: float = 0.0  # the base's part worked in
    copy: float = 0.0  # into a device slot, on the engine's thread


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier ("device", "host", "disk" or "redis") of the adapter cache."""

    hits: Annotated[Count, MetricName("lora_serve_adapter_hits", "Adapter hits per tier.")]
    misses: Annotated[Count, MetricName("lora_serve_adapter_misses", "Adapter misses per tier.")]
    loads: Annotated[Count, MetricName("lora_serve_adapter_loads", "Adapter loads per tier.")]
    evictions: Count
    load_seconds: Seconds
    # Resident now; None: not known here, as other replicas write to the tier.
    num_bytes: Annotated[int | None, MetricName("lora_serve_adapter_bytes", "Bytes of adapters in the tier.")]
    # 0: no limit in bytes.
    budget_bytes: Annotated[
        int, MetricName("lora_serve_adapter_budget_bytes", "Bytes that the tier may hold; 0: no limit.")
    ]
    # Resident now; None: not known here.
    num_items: Annotated[int | None, HELD, MetricName("lora_serve_adapter_count", "Adapters in the tier.")] = None
    # They add up to `evictions`.
    eviction_reasons: Annotated[Mapping[EvictionReason, int], COUNTS] = field(default_factory=dict)


def live_tier(tier: TierStats) -> LiveTier:
    """The figures of a tier that are shown live."""
    return LiveTier(
        tier.num_bytes, tier.budget_bytes, tier.num_items, tier.hits, tier.misses, tier.loads, tier.evictions
    )
