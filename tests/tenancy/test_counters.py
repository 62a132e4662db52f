"""Counters in memory: of two minutes, and gone when nobody looks at them any more."""

from __future__ import annotations

from lora_serve.tenancy.rate_limiter import KEPT_MINUTES, MemoryCounters


async def test_counts_are_those_of_a_minute_and_the_one_before() -> None:
    counters = MemoryCounters()
    assert await counters.add({"a": 5, "b": 1}, 10) == {"a": (0, 5), "b": (0, 1)}
    assert await counters.add({"a": -2}, 10) == {"a": (0, 3)}
    assert await counters.add({"a": 4}, 11) == {"a": (3, 4)}
    assert await counters.add({"a": 1}, 13) == {"a": (0, 1)}
    await counters.close()


async def test_what_is_given_back_to_the_minute_before_counts_for_this_one() -> None:
    counters = MemoryCounters()
    await counters.add({"a": 5}, 10)
    await counters.add({"a": 1}, 11)
    assert await counters.add({"a": -2}, 10) == {"a": (0, 3)}
    assert await counters.add({"a": 1}, 11) == {"a": (3, 2)}


async def test_counters_that_nobody_reads_any_more_are_dropped() -> None:
    now = 0.0
    counters = MemoryCounters(lambda: now)
    for minute in (1, 2, 3, 50, 51, 7):  # at last the wall clock is set back
        now += 61.0
        await counters.add({f"old-{minute}-{number}": 1 for number in range(100)}, minute)
        assert len(counters._minutes) <= KEPT_MINUTES
    now += 61.0 * KEPT_MINUTES
    await counters.add({"a": 1}, 8)
    assert list(counters._minutes) == [8]


async def test_clock_that_jumps_and_comes_back_finds_its_minute_again() -> None:
    counters = MemoryCounters(lambda: 0.0)
    await counters.add({"a": 2}, 100)
    assert await counters.add({"a": 1}, 9000) == {"a": (0, 1)}
    assert await counters.add({"a": 1}, 100) == {"a": (0, 3)}
