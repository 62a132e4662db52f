"""Retry-After, learned from past loads."""

from __future__ import annotations

import time

import pytest

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.request import OnCold
from lora_serve.engine.counters import LoadEstimate
from tests.engine.world import World, adapter

MIB = 2**20


def learned(per_load: float, per_byte: float, sizes: list[int], times: int = 20) -> LoadEstimate:
    estimate = LoadEstimate()
    for _ in range(times):
        for size in sizes:
            estimate.learn(size, per_load + per_byte * size)
    return estimate


def test_before_anything_was_learned_a_second_is_said() -> None:
    assert LoadEstimate().retry_after([adapter("a", 10**9)], {}, 0.0) == 1.0


def test_seconds_per_load_and_per_byte_are_told_apart() -> None:
    estimate = learned(2.0, 3 / MIB, [MIB, 4 * MIB, 2 * MIB])
    assert estimate.seconds(0) == pytest.approx(2.0)
    assert estimate.seconds(10 * MIB) == pytest.approx(32.0)


def test_equal_sizes_teach_the_mean() -> None:
    assert learned(1.0, 2 / MIB, [MIB]).seconds(MIB) == pytest.approx(3.0)


def test_larger_loads_that_were_quicker_do_not_make_the_estimate_negative() -> None:
    estimate = LoadEstimate()
    for size, seconds in [(1, 9.0), (1000, 1.0), (1, 9.0), (1000, 1.0)]:
        estimate.learn(size, seconds)
    assert 1.0 <= estimate.seconds(10**9) <= 9.0
    steep = LoadEstimate()
    for size, seconds in [(1000, 0.0), (2000, 9.0)] * 4:
        steep.learn(size, seconds)
    assert steep.seconds(0) >= 0


def test_the_newest_loads_count_most() -> None:
    estimate = learned(50.0, 0.0, [MIB])
    for _ in range(20):
        estimate.learn(MIB, 2.0)
    assert estimate.seconds(MIB) == pytest.approx(2.0, abs=1.0)


def test_loads_that_stand_before_it_are_added_and_later_ones_are_not() -> None:
    estimate = learned(10.0, 0.0, [MIB])
    one, two, three = (adapter(name) for name in ("one", "two", "three"))
    in_flight = {ref.digest: (ref, 100.0) for ref in (one, two, three)}
    assert estimate.retry_after([two], in_flight, 100.0) == pytest.approx(20.0)
    assert estimate.retry_after([two], in_flight, 104.0) == pytest.approx(12.0)
    assert estimate.retry_after([adapter("four")], in_flight, 100.0) == pytest.approx(40.0)


def test_what_is_late_already_is_expected_to_take_as_long_again() -> None:
    estimate = learned(2.0, 0.0, [MIB])
    ref = adapter("a")
    assert estimate.retry_after([ref], {ref.digest: (ref, 100.0)}, 130.0) == pytest.approx(30.0)


def test_who_waits_for_no_load_waits_the_least() -> None:
    estimate = learned(50.0, 0.0, [MIB])
    under_way = {ref.digest: (ref, 100.0) for ref in (adapter("a"), adapter("b"))}
    assert estimate.retry_after([], under_way, 100.0) == 1.0


def test_never_more_than_two_minutes() -> None:
    assert learned(900.0, 0.0, [MIB]).retry_after([adapter("a")], {}, 0.0) == 120.0


def test_refused_request_hears_of_the_loads_that_were_measured() -> None:
    world = World(auto_load=False)
    for name in "ab":
        world.add(f"warms {name}", [1], adapter(name))
        world.step()
        world.finish_load(adapter(name), seconds=7.0)
        world.run()
    world.add("refused", [1], adapter("c"), on_cold=OnCold.FAIL)
    error = world.error("refused")
    assert isinstance(error, AdapterUnavailableError)
    assert error.retry_after == pytest.approx(7.0, abs=0.1)
    world.add("next", [1], adapter("d"), max_cold_wait=0.5, arrival_time=time.monotonic())
    world.take(world.scheduler.expire(time.monotonic() + 1))
    late = world.error("next")
    assert isinstance(late, AdapterUnavailableError)
    assert late.retry_after == pytest.approx(14.0, abs=0.2)


def test_failed_loads_teach_nothing() -> None:
    world = World(auto_load=False)
    world.add("fails", [1], adapter("a"))
    world.step()
    world.finish_load(adapter("a"), AdapterUnavailableError("gone"), seconds=100.0)
    world.add("refused", [1], adapter("b"), on_cold=OnCold.FAIL)
    error = world.error("refused")
    assert isinstance(error, AdapterUnavailableError)
    assert error.retry_after == 1.0
