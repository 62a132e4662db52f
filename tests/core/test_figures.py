"""Several engines' figures as one's: nothing is lost and nothing counted twice, in whatever order they are added."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import reduce
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.client.wire import frame_of, from_engine
from lora_serve.core.figures import EvictionReason, LoadTimes, TierStats, added, counters_of
from lora_serve.core.messages import Reply
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.stats import (
    EMPTY,
    AdapterCounters,
    AdapterSpeculation,
    BatcherStats,
    ConstraintStats,
    EngineStats,
    MemoryStats,
    ReplicaState,
    ReplicaStats,
    SlotInfo,
    SpeculationStats,
    SwapStats,
    merged,
)
from tests.tiers import by_tier

LIMITS = BatchLimits(max_num_seqs=8, max_num_batched_tokens=64)
TEXTS = st.sampled_from("abc")


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of `core/stats.py`: small whole numbers, so that sums of floats are exact."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is BatchLimits:
        return st.just(LIMITS)
    if kind in (int, float):
        return st.integers(0, 2**40).map(kind)
    if kind is str:
        return TEXTS
    if kind is bool:
        return st.booleans()
    if origin in (types.UnionType, typing.Union):
        return st.one_of([st.none() if part is type(None) else values_of(part) for part in arguments])
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3, unique=arguments[0] is str).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, EvictionReason):
        return st.sampled_from(EvictionReason)
    return objects_of(kind)


def objects_of(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    others = {name: values_of(part) for name, part in hints.items() if name not in given}
    return st.builds(kind, **others, **given)


GUESSES = st.dictionaries(
    st.lists(TEXTS, max_size=2, unique=True).map(tuple), st.tuples(st.integers(1, 99), st.integers(0, 99)), max_size=3
).map(
    lambda owners: tuple(
        sorted(
            (
                AdapterSpeculation(digests, digests, drafted, accepted, round(accepted / drafted, 3))
                for digests, (drafted, accepted) in owners.items()
            ),
            key=lambda guesses: -guesses.num_drafted,
        )
    )
)
SPECULATION = objects_of(SpeculationStats, adapters=GUESSES, mode=st.just("auto"))
ENGINES = objects_of(EngineStats, speculation=SPECULATION, replicas=st.none(), num_replicas_lost=st.just(0))


def replica(name: str, stats: EngineStats | None = None, state: ReplicaState = ReplicaState.READY) -> ReplicaStats:
    return ReplicaStats(name, "10.0.0.1", state, stats=stats)


def without_order(stats: EngineStats) -> dict[str, Any]:
    """Guesses are sorted by their number alone."""
    owners = {guesses.digests: guesses for guesses in stats.speculation.adapters}
    return asdict(replace(stats, speculation=replace(stats.speculation, adapters=()))) | {"owners": owners}


@given(ENGINES)
def test_one_replica_is_its_own_figures_with_its_name_on_its_slots(stats: EngineStats) -> None:
    only = replica("r-1", stats)
    slots = tuple(replace(slot, replica="r-1") for slot in stats.slots)
    assert merged([only]) == replace(stats, slots=slots, replicas=(only,))


@given(ENGINES, ENGINES, ENGINES)
def test_it_does_not_matter_which_are_added_first(one: EngineStats, two: EngineStats, three: EngineStats) -> None:
    assert without_order(added(added(one, two), three)) == without_order(added(one, added(two, three)))


@given(ENGINES)
def test_nothing_added_changes_nothing(stats: EngineStats) -> None:
    assert added(stats, EMPTY) == stats == added(EMPTY, stats)


@settings(max_examples=by_tier(6, 400))
@given(st.lists(ENGINES, min_size=2, max_size=4))
def test_every_count_is_the_sum_of_the_replicas(all_stats: list[EngineStats]) -> None:
    whole = merged([replica(f"r-{number}", stats) for number, stats in enumerate(all_stats)])
    hints = get_type_hints(EngineStats)
    counts = {name for name, kind in hints.items() if kind in (int, float)} - {"block_size", "num_replicas_lost"}
    assert len(counts) > 10
    for name in counts:
        assert getattr(whole, name) == sum(getattr(stats, name) for stats in all_stats), name
    for digest in {digest for stats in all_stats for digest in stats.adapters}:
        of_each = [stats.adapters.get(digest, AdapterCounters()) for stats in all_stats]
        for name in ("a", "b"):
            total = sum(counters.hits.get(name, 0) for counters in of_each)
            assert whole.adapters[digest].hits.get(name, 0) == total
        for reason in EvictionReason:
            total = sum(counters.eviction_reasons.get(reason, 0) for counters in of_each)
            assert whole.adapters[digest].eviction_reasons.get(reason, 0) == total
    for tier in {tier for stats in all_stats for tier in stats.tiers}:
        loads = sum(stats.tiers[tier].loads for stats in all_stats if tier in stats.tiers)
        assert whole.tiers[tier].loads == loads
    assert len(whole.slots) == sum(len(stats.slots) for stats in all_stats)
    assert set(whole.host_digests) == {digest for stats in all_stats for digest in stats.host_digests}
    assert len(whole.host_digests) == len(set(whole.host_digests))


@given(ENGINES)
def test_a_fleets_figures_cross_between_processes(stats: EngineStats) -> None:
    sent = Reply(1, merged([replica("a", stats), replica("b", None, ReplicaState.STARTING)], num_lost=2))
    frame = frame_of([sent])
    assert from_engine(frame[4:]) == [sent]


def test_slots_of_one_index_are_told_apart_by_their_replica() -> None:
    slot = SlotInfo(1, 1, "sha256:a", "acme/a", 10, 0, False)
    both = merged([replica(name, replace(EMPTY, slots=(slot,))) for name in ("a", "b")])
    assert [(one.replica, one.index) for one in both.slots] == [("a", 1), ("b", 1)]


def test_no_counter_falls_when_a_replica_is_lost() -> None:
    tier = TierStats(5, 4, 3, 2, 1.5, 100, 1000, 7, {EvictionReason.CAPACITY: 2})
    counted = replace(
        EMPTY, num_steps=9, num_prefix_hits=6, swap=SwapStats(4, 3), memory=MemoryStats(num_out_of_memory=1),
        constraints=ConstraintStats(5, 0.5, 6, 0.25, 0.125), speculation=SpeculationStats(4, 3, 12, 7, (4, 2, 1)),
        tiers={"device": replace(tier, num_bytes=0, budget_bytes=0, num_items=0)},
    )  # fmt: skip
    dying = replace(
        counted, num_running=3, max_loras=4, tiers={"device": tier}, host_digests=("sha256:a",),
        memory=MemoryStats(limit=10, weights=5, num_out_of_memory=1), swap=SwapStats(4, 3, 20, 10, 0.5),
        adapters={"sha256:a": AdapterCounters({"a": 1})},
    )  # fmt: skip
    assert counters_of(dying) == counted
    other = replace(EMPTY, num_running=1, num_steps=1, max_loras=4)
    after = merged([replica("b", other)], counters_of(dying), num_lost=1)
    assert replace(after, replicas=None) == replace(
        counted, num_running=1, num_steps=10, max_loras=4, num_replicas_lost=1
    )


@given(ENGINES)
def test_counters_of_a_lost_replica_are_all_that_counts(stats: EngineStats) -> None:
    """A new figure that is a count since start has to be named there."""
    gauges = {
        "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_constrained", "num_waiting_tokens",
        "num_running_tokens", "num_replicas_lost",
    }  # fmt: skip
    counted = counters_of(stats)
    for name, kind in get_type_hints(EngineStats).items():
        if kind in (int, float) and name.startswith(("num_", "step_")):
            assert getattr(counted, name) == (0 if name in gauges else getattr(stats, name)), name


def test_batcher_is_that_of_the_replica_with_the_latest_first_tokens() -> None:
    fast = BatcherStats(LIMITS, 8, 64, 0.0, ttft_p95=0.1, itl_p95=0.5, reason="fast")
    slow = BatcherStats(LIMITS, 4, 32, 0.0, ttft_p95=0.2, itl_p95=0.3, reason="slow")
    quiet = BatcherStats(LIMITS, 8, 64, 0.0, reason="quiet")
    engines = [replica(name, replace(EMPTY, batcher=one)) for name, one in (("a", fast), ("b", quiet), ("c", slow))]
    assert merged(engines).batcher == replace(slow, itl_p95=0.5)


def test_an_adapters_last_load_is_one_that_took_place() -> None:
    times = LoadTimes("disk", fetch=0.5)
    loaded = AdapterCounters({}, {"a": 1}, 1, load_seconds=0.7, last_load=times)
    engines = [replace(EMPTY, adapters={"sha256:a": one}) for one in (loaded, AdapterCounters(hits={"a": 4}))]
    counters = reduce(added, engines).adapters["sha256:a"]
    assert (counters.load_seconds, counters.last_load, counters.hits) == (0.7, times, {"a": 4})


def test_guesses_of_an_adapter_on_two_replicas_are_one_line_with_its_name() -> None:
    lines = [
        AdapterSpeculation(("sha256:a",), ("",), 10, 5, 0.5),
        AdapterSpeculation(("sha256:a",), ("acme/a",), 30, 3, 0.1),
    ]
    engines = [replace(EMPTY, speculation=SpeculationStats(4, adapters=(line,), mode="auto")) for line in lines]
    assert reduce(added, engines).speculation.adapters == (AdapterSpeculation(("sha256:a",), ("acme/a",), 40, 8, 0.2),)


@pytest.mark.parametrize("state", list(ReplicaState))
def test_replica_without_figures_is_listed_and_adds_none(state: ReplicaState) -> None:
    silent = replica("a", None, state)
    assert merged([silent]) == replace(EMPTY, replicas=(silent,))
