"""The forecast of waits follows the pace of the queue, and notices that it has come to a stop."""

from __future__ import annotations

import pytest

from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate, WaitForecast


def test_before_anybody_left_the_wait_so_far_is_known() -> None:
    forecast = WaitForecast()
    forecast.begin(10.0)
    assert forecast.seconds(3, 30, 12.5) == 4 * 2.5


def test_steady_pace_times_those_ahead_and_oneself() -> None:
    forecast = WaitForecast()
    for second in range(1, 40):
        forecast.left(10, float(second), others_wait=True)
    assert forecast.seconds(4, 40, 39.0) == pytest.approx(5.0)
    assert forecast.seconds(4, 500, 39.0) == pytest.approx(50.0)  # longer prompts than usual


def test_request_that_finds_a_free_row_has_not_waited() -> None:
    forecast = WaitForecast()
    for second in range(1, 20):
        forecast.begin(float(second))
        forecast.left(10, second + 0.005, others_wait=False)
    assert forecast.seconds(0, 0, 20.0) == 0.0
    forecast.begin(20.0)
    assert forecast.seconds(1, 10, 20.25) == 2 * 0.25


def test_flood_after_quiet_is_noticed_within_a_few_departures() -> None:
    forecast = WaitForecast()
    for second in range(1, 100):
        forecast.begin(float(second))
        forecast.left(10, second + 0.005, others_wait=True)
    forecast.begin(100.0)
    assert forecast.seconds(9, 90, 101.0) > 1.0  # nobody has left for a second
    for number in range(5):
        forecast.left(10, 100.5 + 0.5 * number, others_wait=True)
    assert 2.0 < forecast.seconds(9, 90, 102.5) < 5.1


def test_pace_of_rows_is_that_of_their_ends_while_none_is_free() -> None:
    forecast = WaitForecast()
    forecast.places = 1
    for second in range(20):
        forecast.started(f"r{second}", float(second))
        forecast.ended(f"r{second}", second + 0.5)
        assert forecast.seconds(0, 0, second + 0.5) == 0.0  # a row is free
    forecast.started("long", 20.0)
    assert forecast.seconds(0, 0, 20.0) == pytest.approx(0.5)
    forecast.begin(20.0)
    assert forecast.seconds(3, 0, 20.0) == pytest.approx(2.0)
    forecast.ended("unknown", 20.1)
    assert forecast.is_full


def test_gate_asks_it_for_those_that_wait_and_for_the_newcomer() -> None:
    now = 0.0
    gate = QueueGate(QueueLimits(max_queue=3), clock=lambda: now)
    gate.forecast.places = 1
    rows = [InferenceRequest(f"r{number}", (1, 2)) for number in range(4)]
    assert gate.predicted_wait(rows[:1]) == 0.0  # nobody waits
    gate.enter(rows[:2])
    now = 4.0
    assert gate.predicted_wait(rows[2:3]) == 3 * 4.0
    gate.start("r0")
    assert gate.predicted_wait(rows[2:3]) == 2 * 4.0
    gate.start("r1")
    now = 6.0
    gate.leave("r0")
    assert gate.predicted_wait(rows[2:3]) == 2.0  # r1 has the only row, a row took 2 s
    gate.leave("r1")
    assert gate.predicted_wait(rows[2:3]) == 0.0
    gate.enter(rows[3:])
    assert gate.predicted_wait(rows[:3]) == float("inf")  # they would be refused
