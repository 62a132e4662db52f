"""Earliest deadline first, and early words for what cannot make it."""

from __future__ import annotations

import pytest

from lora_serve.core.batch import Batch, StepLoad
from lora_serve.core.errors import CapacityError, RequestTimeoutError
from lora_serve.core.messages import ErrorEvent, FinishEvent
from lora_serve.engine.step_cost import StepCost
from tests.engine.policies.traffic import ids, policy_of, timed_world, waiting
from tests.engine.world import World


def seconds(batch: Batch) -> float:
    return 0.01 + 0.001 * batch.num_tokens


def learned() -> StepCost:
    cost = StepCost()
    for number in range(200):
        load = StepLoad(1 + number % 50, 1 + number % 3, 0, 10 * (number % 7))
        cost.observe(load, 0.01 + 0.001 * load.num_tokens)
    return cost


def test_earliest_deadline_first_then_those_without_by_arrival() -> None:
    policy = policy_of("deadline")
    for number, deadline in enumerate([None, 9.0, 3.0, None, 5.0]):
        policy.add(waiting(number, deadline=deadline))
    assert ids(policy) == [2, 4, 1, 0, 3]


def test_without_a_deadline_one_waits_max_wait_at_most() -> None:
    policy = policy_of("deadline", max_wait=10)
    for number, deadline in enumerate([None, 19.0, 12.0]):
        policy.add(waiting(number, deadline=deadline, arrival_time=float(number)))
    assert ids(policy, now=9.0) == [2, 1, 0]
    assert ids(policy, now=10.5) == [0, 2, 1]


def test_nobody_is_refused_while_the_cost_is_not_learned() -> None:
    policy = policy_of("deadline")
    assert policy.refusal(waiting(0, prompt_tokens=10_000, deadline=1e-6), 0.0) is None


def test_what_lost_its_time_in_the_queue_may_come_again() -> None:
    policy = policy_of("deadline", cost=learned())
    sequence = waiting(0, prompt_tokens=40, deadline=10.0)
    assert policy.refusal(sequence, 9.93) is None
    refusal = policy.refusal(sequence, 9.96)
    assert isinstance(refusal, CapacityError)
    assert refusal.retry_after == pytest.approx(9.96)


def test_what_never_had_the_time_is_told_how_much_it_takes() -> None:
    policy = policy_of("deadline", cost=learned())
    refusal = policy.refusal(waiting(0, prompt_tokens=400, deadline=0.2), 0.0)
    assert isinstance(refusal, RequestTimeoutError)
    assert "200 ms" in str(refusal)


def test_known_prefix_takes_no_time_and_min_tokens_do() -> None:
    policy = policy_of("deadline", cost=learned(), num_known=lambda sequence: 39)
    assert policy.refusal(waiting(0, prompt_tokens=40, deadline=10.0), 9.96) is None
    sequence = waiting(1, prompt_tokens=40, deadline=10.0)
    object.__setattr__(sequence.request.sampling, "min_tokens", 20)
    assert policy.refusal(sequence, 9.96) is not None


def test_without_a_deadline_nothing_is_refused() -> None:
    assert policy_of("deadline", cost=learned()).refusal(waiting(0, prompt_tokens=10_000), 1e9) is None


def overloaded(policy: str) -> tuple[World, list[str], list[str]]:
    """Twice the capacity, all with 0.3 s; who was answered in time, and who ran for nothing."""
    world, clock = timed_world(policy, seconds=seconds, max_num_seqs=4, max_wait_ms=1e6)
    for number in range(40):
        world.add(f"w{number}", [number], max_tokens=4)
    world.run()
    for number in range(120):
        world.add(f"r{number}", [number, *range(19)], max_tokens=2, min_tokens=2, deadline=clock.now + 0.3)
        if number % 3 == 0:
            world.step()
    world.run()
    world.check_answers()
    world.check_nothing_held()
    ends = {name: end for name, end in world.ends.items() if name.startswith("r")}
    good = [name for name, end in ends.items() if isinstance(end, FinishEvent)]
    in_vain = [name for name, end in ends.items() if isinstance(end, ErrorEvent) and name in world.prompts]
    assert len(ends) == 120
    return world, good, in_vain


def test_under_overload_more_make_it_and_almost_none_is_begun_in_vain() -> None:
    world, good, in_vain = overloaded("deadline")
    _, good_fcfs, in_vain_fcfs = overloaded("fcfs")
    assert len(good) > len(good_fcfs)
    assert len(in_vain) < len(in_vain_fcfs)
    refused = [name for name in world.ends if isinstance(world.ends[name], ErrorEvent) and name not in in_vain]
    early = [name for name in refused if isinstance(world.error(name), CapacityError)]
    assert len(early) > 0.5 * len(refused) > 0, "the others' time ended within one step"
