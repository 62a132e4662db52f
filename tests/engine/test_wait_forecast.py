"""The forecast of waits follows the pace of the queue, and notices that it has come to a stop."""

from __future__ import annotations

import pytest

from lora_serve.core.config import QueueLimits
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine.wait_forecast import WaitForecast


def test_before_anybody_left_the_wait_so_far_is_known() -> None:
    forecast = WaitForecast()
    forecast.begin(10.0)
    assert forecast.seconds(3, 30, 12.5) == 2.5


def test_steady_pace_times_those_ahead() -> None:
    forecast = WaitForecast()
    for second in range(1, 40):
        forecast.left(10, float(second))
    assert forecast.seconds(5, 50, 39.0) == pytest.approx(5.0)
    assert forecast.seconds(5, 500, 39.0) == pytest.approx(50.0)  # longer prompts than usual


def test_idle_time_is_no_wait() -> None:
    forecast = WaitForecast()
    for second in range(1, 20):
        forecast.begin(float(second))
        forecast.left(10, second + 0.01)
    assert forecast.seconds(4, 40, 19.01) == pytest.approx(0.04)


def test_flood_after_quiet_is_noticed_within_a_few_departures() -> None:
    forecast = WaitForecast()
    for second in range(1, 100):
        forecast.begin(float(second))
        forecast.left(10, second + 0.005)
    forecast.begin(100.0)
    assert forecast.seconds(10, 100, 101.0) > 1.0  # nobody has left for a second
    for number in range(5):
        forecast.left(10, 100.5 + 0.5 * number)
    assert 2.0 < forecast.seconds(10, 100, 102.5) < 5.1


def test_gate_asks_it_for_those_that_wait_and_for_the_newcomer() -> None:
    now = 0.0
    gate = QueueGate(QueueLimits(3), clock=lambda: now)
    gate.forecast = WaitForecast()
    rows = [InferenceRequest(f"r{number}", (1, 2)) for number in range(4)]
    assert gate.predicted_wait(rows[:1]) == 0.0  # nobody waits
    gate.enter(rows[:2])
    now = 4.0
    assert gate.predicted_wait(rows[2:3]) == 4.0
    gate.start("r0")
    assert gate.predicted_wait(rows[2:3]) == 8.0  # two places at 4 s
    assert gate.predicted_wait(rows[:1] * 3) == float("inf")  # they would be refused
