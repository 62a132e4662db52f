"""When a neighbour is left alone, and how it comes back."""

from __future__ import annotations

from lora_serve.server.overflow.neighbour import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker(Clock())
    for _ in range(2):
        breaker.failed()
    breaker.began()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.lets_pass
    breaker.failed()
    assert (breaker.state, breaker.lets_pass) == (BreakerState.OPEN, False)


def test_answers_that_always_break_off_open_it_too() -> None:
    breaker = Breaker(Clock())
    for _ in range(3):
        breaker.began()
        breaker.failed()
    assert breaker.state is BreakerState.OPEN


def test_each_rest_is_twice_as_long_as_the_last_and_a_success_forgets_them() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed(is_certain=True)
    rests = []
    for _ in range(8):
        before = clock.now
        while not breaker.wants_probe:
            clock.now += 0.5
        rests.append(clock.now - before)
        breaker.probed(is_well=False)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 60
    breaker.probed(is_well=True)
    breaker.begin()
    breaker.began()
    breaker.succeeded()
    breaker.failed(is_certain=True)
    clock.now += 1
    assert breaker.wants_probe


def test_after_the_probe_one_request_goes_alone() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed(is_certain=True, rest=5.0)
    clock.now = 4.9
    assert not breaker.wants_probe
    clock.now = 5.0
    breaker.probed(is_well=True)
    assert breaker.lets_pass
    breaker.begin()
    assert not breaker.lets_pass
    breaker.abandoned()
    assert breaker.lets_pass
    breaker.begin()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    breaker.failed()  # one that was under way
    clock.now = 7.0
    assert breaker.wants_probe
