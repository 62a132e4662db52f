"""Rows of what is on the device first, one load for many rows, and nobody skipped for ever."""

from __future__ import annotations

import random

from lora_serve.core.request import OnCold
from tests.engine.policies.traffic import STEP, ids, policy_of, timed_world, waiting
from tests.engine.world import World, adapter


def test_order_is_device_then_host_by_size_then_cold_by_size() -> None:
    names = ["cold1", "host1", "cold2", "dev1", "host2", None, "host2", "cold2", "dev2"]
    policy = policy_of(
        "affinity",
        is_on_device=lambda ref: ref.name.startswith("dev"),
        is_on_host=lambda ref: not ref.name.startswith("cold"),
    )
    for number, name in enumerate(names):
        policy.add(waiting(number, adapter(name) if name else None))
    assert ids(policy) == [3, 5, 8, 4, 6, 1, 2, 7, 0]


def test_who_has_waited_long_comes_first_in_order_of_arrival() -> None:
    policy = policy_of("affinity", max_wait=10, is_on_device=lambda ref: ref.name == "here")
    for number, name in enumerate(["cold", "here", "tail", "here"]):
        policy.add(waiting(number, adapter(name), arrival_time=float(number)))
    assert ids(policy, now=9.5) == [1, 3, 0, 2]
    assert ids(policy, now=11.5) == [0, 1, 3, 2]
    assert ids(policy, now=12.5) == [0, 1, 2, 3]


def test_loads_are_asked_for_in_order_of_arrival_one_of_each_adapter() -> None:
    policy = policy_of("affinity", is_on_device=lambda ref: ref.name == "here")
    for number, name in enumerate(["a", "here", "b", "b", "a", "c"]):
        policy.add(waiting(number, adapter(name)))
    assert [sequence.sequence_id for sequence in policy.prefetch_order(0.0)] == [0, 2, 5]


def test_sequence_whose_fallback_answers_is_no_longer_cold() -> None:
    policy = policy_of("affinity")
    changed, other = waiting(0, adapter("cold"), fallback=(), on_cold=OnCold.BASE), waiting(1, adapter("cold"))
    base = waiting(2)
    for sequence in (changed, other, base):
        policy.add(sequence)
    assert ids(policy) == [2, 0, 1]
    changed.adapters, changed.fallback, changed.fell_back = (), None, True
    assert ids(policy) == [0, 2, 1]
    for sequence in (changed, other, base):
        policy.remove(sequence)
    assert ids(policy) == []


def zipf_world(policy: str, max_wait_ms: float = 1e6) -> tuple[World, dict[str, float]]:
    """200 adapters over 4 slots, Zipf 1.1, twice as much as the engine can do; when each began to be answered."""
    generator = random.Random(7)
    world, clock = timed_world(policy, max_num_seqs=8, max_loras=4, max_wait_ms=max_wait_ms)
    weights = [rank**-1.1 for rank in range(1, 201)]
    begun: dict[str, float] = {}
    for number in range(400):
        name = generator.choices(range(200), weights)[0]
        world.add(f"r{number}", [number], adapter(f"a{name}"), max_tokens=6)
        if number % 3 == 2:
            world.step()
        begun |= {request: clock.now for request in world.prompts if request not in begun}
    while world.step():
        begun |= {request: clock.now for request in world.prompts if request not in begun}
    world.check_answers()
    world.check_nothing_held()
    return world, {request: time - world._requests[request].arrival_time for request, time in begun.items()}


def test_fewer_slot_loads_than_first_come_first_served_on_zipf_traffic() -> None:
    fcfs, _ = zipf_world("fcfs")
    affinity, _ = zipf_world("affinity")
    loads = [world.residency.tiers()["device"].loads for world in (fcfs, affinity)]
    assert loads[1] < 0.9 * loads[0], loads


def test_tail_adapters_are_not_starved_by_hot_ones() -> None:
    """Hot rows come for ever; the tail's begin within max_wait, and the steps that its slot and place take."""
    world, clock = timed_world("affinity", max_num_seqs=4, max_loras=2, max_wait_ms=500)
    for number in range(40):
        world.add(f"hot{number}", [number], adapter(f"h{number % 2}"), max_tokens=6)
        world.step()
    for number in range(3):
        world.add(f"tail{number}", [number], adapter(f"t{number}"), max_tokens=6)
    arrived, number = clock.now, 40
    while "tail2" not in world.prompts:
        if len(world.scheduler.waiting) < 8:
            world.add(f"hot{number}", [number], adapter(f"h{number % 2}"), max_tokens=6)
            number += 1
        world.step()
        assert clock.now - arrived <= 0.5 + 3 * 2 * 7 * STEP
    assert clock.now - arrived > 0.5, "they are skipped as long as that"
