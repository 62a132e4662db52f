"""The figures of the whole server, from the last look at each of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_serve.console.live.frames import Blocks
from lora_serve.core.live import EngineView, LiveLimits, LiveSettings, LiveTier


@dataclass(frozen=True, slots=True)
class Overall:
    """Shown to those who see everything."""

    max_loras: int  # of one engine
    blocks: Blocks
    limits: LiveLimits
    tiers: Mapping[str, LiveTier]  # the same object as long as nobody looked at them again
    num_preemptions: int
    num_restarts: int


def overall_of(
    present: Sequence[EngineView], settings: LiveSettings, tiers: Mapping[str, LiveTier], num_restarts: int
) -> Overall:
    """The sums over all engines; limits are those of one, as the admin sets them for each."""
    return Overall(
        max((look.max_loras for look in present), default=0),
        Blocks(
            sum(look.num_blocks for look in present),
            sum(look.num_free_blocks for look in present),
            sum(look.num_known_blocks for look in present),
        ),
        settings.limits,
        tiers,
        sum(look.num_preemptions for look in present),
        num_restarts,
    )


def tiers_of(settings: Sequence[LiveSettings], stores: Mapping[str, LiveTier]) -> Mapping[str, LiveTier]:
    """The engines' tiers, added up, and the stores'."""
    found: dict[str, LiveTier] = {}
    for one in settings:
        for name, tier in one.tiers.items():
            found[name] = _added(found[name], tier) if name in found else tier
    return {**found, **stores}


def _added(one: LiveTier, other: LiveTier) -> LiveTier:
    return LiveTier(
        _sum(one.bytes, other.bytes),
        one.budget + other.budget,
        _sum(one.items, other.items),
        one.hits + other.hits,
        one.misses + other.misses,
        one.loads + other.loads,
        one.evictions + other.evictions,
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
