"""Quantiles of recent times agree with numpy's, and old times fade."""

from __future__ import annotations

import numpy as np
import pytest

from lora_serve.console.live.scene import FadingTimes, LastSecond, Percentiles, TokenRate


@pytest.mark.parametrize("scale", [0.05, 3.0, 40.0, 20_000.0])
def test_quantiles_are_right_to_a_few_percent(scale: float) -> None:
    times = FadingTimes(kept=0.9)
    sample = np.random.default_rng(7).lognormal(np.log(scale), 0.8, 3000)
    for one in sample:
        times.add(float(one))
    found = times.percentiles()
    assert found.p50 == pytest.approx(np.quantile(sample, 0.5), rel=0.05)
    assert found.p95 == pytest.approx(np.quantile(sample, 0.95), rel=0.05)


def test_without_times_there_are_no_quantiles() -> None:
    assert FadingTimes(kept=0.9).percentiles() == Percentiles(None, None)


def test_zero_and_the_longest_times_are_counted() -> None:
    times = FadingTimes(kept=0.9)
    times.add(0.0)
    times.add(1e12, count=3)
    found = times.percentiles()
    assert found.p95 is not None
    assert found.p95 > 1e6


def test_old_times_weigh_less_and_are_forgotten_at_last() -> None:
    times = FadingTimes(kept=0.9)
    times.fade(1000.0)
    times.add(10.0, count=100)
    times.fade(1010.5)
    times.add(100.0, count=50)
    assert times.percentiles().p50 == pytest.approx(100, rel=0.05), "the older hundred are worth 35 by now"
    times.fade(1100.0)
    assert times.percentiles() == Percentiles(None, None)


def test_tokens_of_the_last_second() -> None:
    tokens = LastSecond()
    for tenth in range(30):
        tokens.add(tenth / 10, 2, 1)
    assert tokens.rate(2.95) == TokenRate(20, 10)
    assert tokens.rate(9.0) == TokenRate(0, 0)


def test_tokens_of_a_time_before_the_clock_was_set_back_are_forgotten() -> None:
    tokens = LastSecond()
    tokens.add(5000.0, 2, 1)
    tokens.add(1000.0, 4, 3)
    assert tokens.rate(1000.5) == TokenRate(4, 3)
    assert tokens.rate(1001.5) == TokenRate(0, 0)
