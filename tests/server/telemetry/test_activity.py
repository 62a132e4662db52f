"""Answers of the last minutes, by version and tenant, in bounded memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import pytest

from lora_serve.adapters.catalog.entry import Canary, Route
from lora_serve.server.telemetry import metrics as activity_module
from lora_serve.server.telemetry.metrics import NO_ANSWERS, STEP, WINDOW, Activity, Answers


@dataclass
class Clock:
    now: float = 1_700_000_002.0

    def __call__(self) -> float:
        return self.now


def test_minute_and_window_pass_and_the_last_use_stays() -> None:
    clock = Clock()
    activity, begun = Activity(clock), clock.now
    for failed in (False, True, False):
        activity.record("acme", "a", "d", failed=failed)
    assert activity.answers("a", "d") == Answers(3, 3, 1, begun)
    clock.now += 54
    activity.record("acme", "a", "d", failed=False)
    assert activity.answers("a", "d").per_minute == 4
    clock.now += 10
    assert activity.answers("a", "d") == Answers(1, 4, 1, begun + 54)
    clock.now += 60
    assert activity.answers("a", "d") == Answers(0, 4, 1, begun + 54)
    clock.now += WINDOW
    assert activity.answers("a", "d") == Answers(0, 0, 0, begun + 54)


def test_tenant_is_told_its_own_answers_and_none_of_an_earlier_tenant_of_its_name() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.record("acme", "a", "d", failed=True)
    activity.record("globex", "a", "d", failed=False)
    activity.record("globex", "a", "d", failed=False)
    assert activity.answers("a", "d").in_window == 3
    assert activity.answers("a", "d", "acme") == Answers(1, 1, 1, clock.now)
    assert activity.answers("a", "d", "initech") == activity.answers("b", "d") == NO_ANSWERS
    clock.now += 30
    made = clock.now
    assert activity.answers("a", "d", "globex", since=made) == NO_ANSWERS
    clock.now += 1
    activity.record("globex", "a", "d", failed=False)
    assert activity.answers("a", "d", "globex", since=made) == Answers(1, 1, 0, clock.now)


def test_longest_unused_are_forgotten_first_and_answers_are_added_up() -> None:
    clock = Clock()
    activity = Activity(clock, max_known=4)  # of two versions: each is counted for all and for its tenant
    for name in ("a", "b", "a", "c"):
        activity.record("acme", name, "d", failed=False)
    assert [activity.answers(name, "d").in_window for name in "abc"] == [2, 0, 1]
    both = activity.answers("a", "d").plus(activity.answers("c", "d"))
    assert both == Answers(3, 3, 0, clock.now)


def test_steps_are_kept_of_those_alone_who_had_an_answer_in_the_window() -> None:
    """Adapters come and go: what was answered long ago is one time of a last use, and no list of steps."""
    clock = Clock()
    activity, route = Activity(clock), Route(1, Canary(2, 50.0))
    tracemalloc.start()
    try:
        for number in range(5000):  # twenty windows long
            clock.now += 1.2
            for _ in range(2):
                activity.record("acme", f"adapter-{number % 500}", "d", failed=True, route=route)
        counted = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, activity_module.__file__)])
    finally:
        tracemalloc.stop()
    known, in_window = len(activity._counts), len(activity._in_window)
    assert (known, in_window) == (1000, 2 * (WINDOW + STEP) / 1.2 // 1 + 2)
    assert sum(one.size for one in counted.statistics("filename")) < 1_000_000
    first, last = (activity.answers(f"adapter-{number}", "d") for number in (0, 499))
    assert (first.in_window, last.in_window, last.errors) == (0, 2, 2)
    assert first.last_used == pytest.approx(clock.now - 499 * 1.2)
    assert activity.routed("adapter-0", "d", route) == first
    assert activity.routed("adapter-499", "d", route) == last


def test_counts_of_one_that_always_answers_are_those_of_the_window() -> None:
    clock = Clock()
    activity = Activity(clock)
    for _ in range(3 * WINDOW):
        clock.now += 1.0
        activity.record("acme", "a", "d", failed=False)
    assert WINDOW - STEP <= activity.answers("a", "d").in_window <= WINDOW
    assert len(activity._counts["a", "d", None].steps) == 3 * WINDOW // STEP
