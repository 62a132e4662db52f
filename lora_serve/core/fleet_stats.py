"""Several engines' figures as those of one.

What is counted is added up, what is held is united. Nothing is divided: means and shares are worked out by whoever
shows them. `EMPTY` changes nothing that it is added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import zip_longest
from operator import add
from typing import TypeVar

from lora_serve.core.stats import (
    AdapterCounters,
    AdapterSpeculation,
    BatcherStats,
    ConstraintStats,
    EngineStats,
    MemoryStats,
    ReplicaStats,
    SpeculationStats,
    SwapStats,
    TierStats,
)

T = TypeVar("T")
K = TypeVar("K")

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
    return EngineStats(
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        running_adapters=_united(one.running_adapters, other.running_adapters),
        waiting_adapters=_united(one.waiting_adapters, other.waiting_adapters),
        max_loras=one.max_loras + other.max_loras,
        num_blocks=one.num_blocks + other.num_blocks,
        num_free_blocks=one.num_free_blocks + other.num_free_blocks,
        block_size=max(one.block_size, other.block_size),
        num_preemptions=one.num_preemptions + other.num_preemptions,
        slots=one.slots + other.slots,
        host_digests=_united(one.host_digests, other.host_digests),
        loading_digests=_united(one.loading_digests, other.loading_digests),
        tiers=_by_key(_tiers, one.tiers, other.tiers),
        adapters=_by_key(_adapters, one.adapters, other.adapters),
        recent_batches=one.recent_batches + other.recent_batches,
        num_steps=one.num_steps + other.num_steps,
        step_seconds=one.step_seconds + other.step_seconds,
        num_prefix_queries=one.num_prefix_queries + other.num_prefix_queries,
        num_prefix_hits=one.num_prefix_hits + other.num_prefix_hits,
        batcher=_batchers(one.batcher, other.batcher),
        memory=_memories(one.memory, other.memory),
        swap=_swaps(one.swap, other.swap),
        num_constrained=one.num_constrained + other.num_constrained,
        num_forced=one.num_forced + other.num_forced,
        constraints=_constraints(one.constraints, other.constraints),
        speculation=_speculations(one.speculation, other.speculation),
        num_hung_loads=one.num_hung_loads + other.num_hung_loads,
        steps_by_tokens=_by_place(one.steps_by_tokens, other.steps_by_tokens),
        num_step_tokens=one.num_step_tokens + other.num_step_tokens,
        num_waiting_tokens=one.num_waiting_tokens + other.num_waiting_tokens,
        num_running_tokens=one.num_running_tokens + other.num_running_tokens,
        pid=_chosen(lambda *_: 0, one.pid, other.pid),
    )


def _named(stats: EngineStats, replica: str) -> EngineStats:
    return replace(stats, slots=tuple(replace(slot, replica=replica) for slot in stats.slots))


def _tiers(one: TierStats, other: TierStats) -> TierStats:
    return TierStats(
        one.hits + other.hits,
        one.misses + other.misses,
        one.loads + other.loads,
        one.evictions + other.evictions,
        one.load_seconds + other.load_seconds,
        _sum(one.num_bytes, other.num_bytes),
        one.budget_bytes + other.budget_bytes,
        _sum(one.num_items, other.num_items),
        _by_key(add, one.eviction_reasons, other.eviction_reasons),
    )


def _adapters(one: AdapterCounters, other: AdapterCounters) -> AdapterCounters:
    """The last load and eviction are those of the last replica that had one, as no times are kept."""
    last = other if other.loads else one
    return AdapterCounters(
        one.hits + other.hits,
        one.misses + other.misses,
        one.loads + other.loads,
        one.evictions + other.evictions,
        last.load_seconds,
        _by_key(add, one.eviction_reasons, other.eviction_reasons),
        other.last_eviction or one.last_eviction,
        last.last_load,
    )


def _batchers(one: BatcherStats | None, other: BatcherStats | None) -> BatcherStats | None:
    """The figures of the replica whose first tokens are latest, as the admin's limits are the same for all."""
    if one is None or other is None:
        return one or other
    latest = max(one, other, key=lambda batcher: batcher.ttft_p95 or 0.0)
    return replace(latest, itl_p95=_chosen(max, one.itl_p95, other.itl_p95))


def _memories(one: MemoryStats, other: MemoryStats) -> MemoryStats:
    return MemoryStats(
        _sum(one.limit, other.limit),
        one.weights + other.weights,
        one.kv + other.kv,
        one.adapters + other.adapters,
        one.activations + other.activations,
        one.largest + other.largest,
        one.measured_peak + other.measured_peak,
        one.num_out_of_memory + other.num_out_of_memory,
        _chosen(min, one.max_tokens, other.max_tokens),
    )


def _swaps(one: SwapStats, other: SwapStats) -> SwapStats:
    return SwapStats(
        one.num_swapped + other.num_swapped,
        one.num_recomputed + other.num_recomputed,
        one.num_blocks + other.num_blocks,
        one.num_used + other.num_used,
        max(one.seconds_per_block, other.seconds_per_block),
    )


def _constraints(one: ConstraintStats, other: ConstraintStats) -> ConstraintStats:
    return ConstraintStats(
        one.num_compiled + other.num_compiled,
        one.compile_seconds + other.compile_seconds,
        one.num_masks + other.num_masks,
        one.mask_seconds + other.mask_seconds,
        one.wait_seconds + other.wait_seconds,
    )


def _speculations(one: SpeculationStats, other: SpeculationStats) -> SpeculationStats:
    owners = _by_key(
        _guesses,
        {guesses.digests: guesses for guesses in one.adapters},
        {guesses.digests: guesses for guesses in other.adapters},
    )
    return SpeculationStats(
        max(one.most, other.most),
        one.num_drafts + other.num_drafts,
        one.num_drafted + other.num_drafted,
        one.num_accepted + other.num_accepted,
        _by_place(one.accepted_by_place, other.accepted_by_place),
        tuple(sorted(owners.values(), key=lambda guesses: -guesses.num_drafted)),
        other.mode if one.mode == "off" else one.mode,
    )


def _guesses(one: AdapterSpeculation, other: AdapterSpeculation) -> AdapterSpeculation:
    num_drafted, num_accepted = one.num_drafted + other.num_drafted, one.num_accepted + other.num_accepted
    names = tuple(first or second for first, second in zip_longest(one.names, other.names, fillvalue=""))
    return AdapterSpeculation(
        one.digests, names, num_drafted, num_accepted, round(num_accepted / max(1, num_drafted), 3)
    )


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
