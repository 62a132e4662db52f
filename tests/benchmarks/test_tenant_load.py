"""When the open loop sends."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.tenant_load import Stream, arrivals


def test_random_arrivals_have_the_rate_and_are_the_same_for_a_seed() -> None:
    stream = Stream("acme", "acme/a", rate=20.0)
    times = list(arrivals(stream, 100.0, seed=1))
    assert times == list(arrivals(stream, 100.0, seed=1)) != list(arrivals(stream, 100.0, seed=2))
    assert times == sorted(times)
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert all(0 < moment < 100 for moment in times)


def test_bursts_come_at_once_in_regular_gaps() -> None:
    times = list(arrivals(Stream("acme", "acme/a", rate=8.0, burst=16), 20.0, seed=1))
    assert [len(list(group)) for _, group in itertools.groupby(times)] == [16] * 10
    assert times[0] == 1.0
    assert times[16] == 3.0
