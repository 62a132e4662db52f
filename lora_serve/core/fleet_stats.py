"""Several engines' figures as those of one.

What is counted is added up, what is held is united. Nothing is divided: means and shares are worked out by whoever
shows them. `EMPTY` changes nothing that it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from itertools import zip_longest
from operator import add
from typing import Any, TypeVar

from lora_serve.core.stats import (
    AdapterCounters,
    AdapterSpeculation,
    BatcherStats,
    EngineStats,
    MemoryStats,
    ReplicaStats,
    SpeculationStats,
    SwapStats,
    TierStats,
)

T = TypeVar("T")
K = TypeVar("K")
S = TypeVar("S", bound=Any)  # a class of core/stats.py

EMPTY = EngineStats(
    num_running=0,
    num_waiting=0,
    running_adapters=(),
    waiting_adapters=(),
    max_loras=0,
    num_blocks=0,
    num_free_blocks=0,
    block_size=0,
    num_preemptions=0,
    slots=(),
    host_digests=(),
    loading_digests=(),
)


def merged(replicas: Sequence[ReplicaStats], lost: EngineStats = EMPTY, num_lost: int = 0) -> EngineStats:
    """The fleet's figures: of all replicas that have told theirs, in whatever state they are.

    `lost`: the counters (`counters_of`) of replicas that are no more, so that no counter ever falls.
    """
    known = [_named(replica.stats, replica.replica) for replica in replicas if replica.stats is not None]
    return replace(reduce(added, [*known, lost], EMPTY), replicas=tuple(replicas), num_replicas_lost=num_lost)


def counters_of(stats: EngineStats) -> EngineStats:
    """The figures that count from the engine's start on, without what it holds and does now. Those of single adapters
    are dropped, as nobody would ever forget them.
    """
    return replace(
        EMPTY,
        num_preemptions=stats.num_preemptions,
        tiers={name: replace(tier, num_bytes=0, budget_bytes=0, num_items=0) for name, tier in stats.tiers.items()},
        num_steps=stats.num_steps,
        step_seconds=stats.step_seconds,
        num_prefix_queries=stats.num_prefix_queries,
        num_prefix_hits=stats.num_prefix_hits,
        memory=MemoryStats(num_out_of_memory=stats.memory.num_out_of_memory),
        swap=SwapStats(stats.swap.num_swapped, stats.swap.num_recomputed),
        num_forced=stats.num_forced,
        constraints=stats.constraints,
        speculation=replace(stats.speculation, adapters=()),
        num_hung_loads=stats.num_hung_loads,
        steps_by_tokens=stats.steps_by_tokens,
        num_step_tokens=stats.num_step_tokens,
    )


def added(one: EngineStats, other: EngineStats) -> EngineStats:
    """Figures of two engines as those of one, without their replicas. Slots and blocks are those of both, the limits
    of the batcher those of one engine.
    """
    return _summed(
        one,
        other,
        running_adapters=_united(one.running_adapters, other.running_adapters),
        waiting_adapters=_united(one.waiting_adapters, other.waiting_adapters),
        block_size=max(one.block_size, other.block_size),
        host_digests=_united(one.host_digests, other.host_digests),
        loading_digests=_united(one.loading_digests, other.loading_digests),
        tiers=_by_key(_tiers, one.tiers, other.tiers),
        adapters=_by_key(_adapters, one.adapters, other.adapters),
        batcher=_batchers(one.batcher, other.batcher),
        memory=_memories(one.memory, other.memory),
        swap=_summed(
            one.swap, other.swap, seconds_per_block=max(one.swap.seconds_per_block, other.swap.seconds_per_block)
        ),
        constraints=_summed(one.constraints, other.constraints),
        speculation=_speculations(one.speculation, other.speculation),
        steps_by_tokens=_by_place(one.steps_by_tokens, other.steps_by_tokens),
        replicas=None,
        pid=_chosen(lambda *_: 0, one.pid, other.pid),
    )


def _named(stats: EngineStats, replica: str) -> EngineStats:
    return replace(stats, slots=tuple(replace(slot, replica=replica) for slot in stats.slots))


def _tiers(one: TierStats, other: TierStats) -> TierStats:
    return _summed(
        one,
        other,
        num_bytes=_sum(one.num_bytes, other.num_bytes),
        num_items=_sum(one.num_items, other.num_items),
        eviction_reasons=_by_key(add, one.eviction_reasons, other.eviction_reasons),
    )


def _adapters(one: AdapterCounters, other: AdapterCounters) -> AdapterCounters:
    """The last load and eviction are those of the last replica that had one, as no times are kept."""
    last = other if other.loads else one
    return _summed(
        one,
        other,
        hits=_by_key(add, one.hits, other.hits),
        misses=_by_key(add, one.misses, other.misses),
        load_seconds=last.load_seconds,
        eviction_reasons=_by_key(add, one.eviction_reasons, other.eviction_reasons),
        last_eviction=other.last_eviction or one.last_eviction,
        last_load=last.last_load,
    )


def _batchers(one: BatcherStats | None, other: BatcherStats | None) -> BatcherStats | None:
    """The figures of the replica whose first tokens are latest, as the admin's limits are the same for all."""
    if one is None or other is None:
        return one or other
    latest = max(one, other, key=lambda batcher: batcher.ttft_p95 or 0.0)
    return replace(latest, itl_p95=_chosen(max, one.itl_p95, other.itl_p95))


def _memories(one: MemoryStats, other: MemoryStats) -> MemoryStats:
    limit, max_tokens = _sum(one.limit, other.limit), _chosen(min, one.max_tokens, other.max_tokens)
    return _summed(one, other, limit=limit, max_tokens=max_tokens)


def _speculations(one: SpeculationStats, other: SpeculationStats) -> SpeculationStats:
    owners = _by_key(
        _guesses,
        {guesses.digests: guesses for guesses in one.adapters},
        {guesses.digests: guesses for guesses in other.adapters},
    )
    return _summed(
        one,
        other,
        most=max(one.most, other.most),
        accepted_by_place=_by_place(one.accepted_by_place, other.accepted_by_place),
        adapters=tuple(sorted(owners.values(), key=lambda guesses: -guesses.num_drafted)),
        mode=other.mode if one.mode == "off" else one.mode,
    )


def _guesses(one: AdapterSpeculation, other: AdapterSpeculation) -> AdapterSpeculation:
    num_drafted, num_accepted = one.num_drafted + other.num_drafted, one.num_accepted + other.num_accepted
    names = tuple(first or second for first, second in zip_longest(one.names, other.names, fillvalue=""))
    return AdapterSpeculation(
        one.digests, names, num_drafted, num_accepted, round(num_accepted / max(1, num_drafted), 3)
    )


def _summed(one: S, other: S, **joined: object) -> S:
    """One of the frozen figures for two of them: their fields are added up, but for those that are given."""
    names = [field.name for field in fields(one) if field.name not in joined]
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names}, **joined)


def _by_key(join: Callable[[T, T], T], one: Mapping[K, T], other: Mapping[K, T]) -> dict[K, T]:
    return {**one, **{key: join(one[key], value) if key in one else value for key, value in other.items()}}


def _by_place(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    return tuple(first + second for first, second in zip_longest(one, other, fillvalue=0))


def _united(one: Iterable[T], other: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else one + other


def _chosen(choose: Callable[[T, T], T], one: T | None, other: T | None) -> T | None:
    return one if other is None else other if one is None else choose(one, other)
