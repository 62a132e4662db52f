"""The arithmetic of a sliding minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.tenancy.rate_limiter import WINDOW, WindowCount

counts = st.integers(0, 1000)
parts = st.floats(0, 1, exclude_max=True)


def after(window: WindowCount, seconds: float) -> WindowCount:
    """The same counters later."""
    minutes, elapsed = divmod(window.elapsed + seconds / WINDOW, 1)
    if minutes == 0:
        return WindowCount(window.previous, window.current, elapsed)
    return WindowCount(window.current if minutes == 1 else 0, 0, elapsed)


def test_the_minute_before_counts_less_and_less() -> None:
    assert WindowCount(100, 10, 0.0).used == 110
    assert WindowCount(100, 10, 0.75).used == 35
    assert WindowCount(100, 10, 0.75).remaining(40) == 5


def test_seconds_until_room_are_those_that_it_takes() -> None:
    assert WindowCount(0, 10, 0.5).seconds_until(10, 1) == 30 + 6
    assert WindowCount(10, 0, 0.5).seconds_until(5, 1) == pytest.approx(6)
    assert WindowCount(0, 4, 0.5).seconds_until(5, 1) == 0
    assert WindowCount(0, 0, 0.5).seconds_until(0, 1) == 120


def test_a_limit_is_unused_once_its_last_minute_is_over() -> None:
    assert WindowCount(0, 0, 0.5).seconds_until_unused == 0
    assert WindowCount(3, 0, 0.5).seconds_until_unused == 30
    assert WindowCount(3, 1, 0.5).seconds_until_unused == 90


@given(counts, counts, parts, st.integers(1, 1000), st.data())
def test_whoever_waits_as_long_as_told_gets_in_and_not_much_sooner(
    previous: int, current: int, elapsed: float, limit: int, data: st.DataObject
) -> None:
    cost = data.draw(st.integers(1, limit))
    window = WindowCount(previous, current, elapsed)
    seconds = window.seconds_until(limit, cost)
    later = after(window, seconds + 1e-6)
    assert later.used + cost <= limit + 1e-3
    if seconds > 1e-3:
        sooner = after(window, seconds * 0.99 - 1e-6)
        assert sooner.used + cost > limit - 1e-3
