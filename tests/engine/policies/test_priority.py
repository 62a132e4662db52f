"""Priority classes overtake and preempt, within bounds, and lose nothing."""

from __future__ import annotations

from tests.engine.policies.traffic import STEP, ids, policy_of, timed_world, waiting
from tests.engine.world import World, adapter


def test_higher_class_overtakes_and_the_aged_overtake_all() -> None:
    policy = policy_of("priority", max_wait=10)
    for number, priority in enumerate([5, 0, 1, 0]):
        policy.add(waiting(number, priority=priority, arrival_time=float(number)))
    assert ids(policy, now=9) == [1, 3, 2, 0]
    assert ids(policy, now=10) == [0, 1, 3, 2]


def test_victim_is_the_youngest_of_the_lowest_class_and_only_of_a_lower_one() -> None:
    policy = policy_of("priority")
    running = [waiting(number, priority=priority) for number, priority in enumerate([0, 2, 2, 1])]
    assert policy.victim(running, waiting(9, priority=1)) is running[2]
    assert policy.victim(running, waiting(9, priority=2)) is None
    assert policy.victim(running, None) is running[2]
    assert policy.victim(running[:1], None) is running[0]


def test_who_has_waited_long_is_preempted_by_nobody_and_preempts_nobody() -> None:
    policy = policy_of("priority", max_wait=10)
    old, young = waiting(0, priority=9), waiting(1, priority=1)
    old.waited = 10
    assert policy.victim([old], waiting(2, priority=0)) is None
    assert policy.victim([old, young], None) is young
    assert policy.victim([young], old) is None


def test_preempted_request_completes_with_its_own_answer() -> None:
    world, _ = timed_world("priority", max_num_seqs=2)
    for number in range(2):
        world.add(f"low{number}", [number, 1, 2], adapter("a"), priority=1, max_tokens=20)
    for _ in range(5):
        world.step()
    world.add("high", [7, 8], adapter("b"), max_tokens=3)
    world.step()  # its adapter is asked for
    assert world.scheduler.num_preemptions == 0, "nobody gives way to who cannot run"
    world.step()
    assert "high" in world.prompts, "at once"
    world.run()
    assert world.order == ["high", "low0", "low1"]
    assert world.scheduler.num_preemptions == 1
    world.check_answers()
    world.check_nothing_held()


def test_newcomer_gets_the_blocks_of_a_lower_class() -> None:
    world, _ = timed_world("priority", num_blocks=10, max_model_len=40)
    world.add("low", [1] * 20, priority=1, max_tokens=12)
    world.step()
    world.add("high", [2] * 24, max_tokens=4)
    world.step()
    assert "high" in world.prompts
    world.run()
    assert world.order == ["high", "low"]
    world.check_answers()
    world.check_nothing_held()


def test_newcomer_gets_the_slot_of_a_lower_class() -> None:
    world, _ = timed_world("priority", max_loras=1)
    world.add("low", [1, 2], adapter("a"), priority=1, max_tokens=30)
    world.step()
    world.add("high", [1, 2], adapter("b"), max_tokens=3)
    world.step()  # its adapter is asked for
    world.step()
    assert "high" in world.prompts
    world.run()
    assert world.order == ["high", "low"]
    world.check_answers()
    world.check_nothing_held()


def test_slot_that_a_row_of_the_same_class_uses_too_is_not_taken() -> None:
    world, _ = timed_world("priority", max_loras=1)
    world.add("low", [1, 2], adapter("a"), priority=1, max_tokens=10)
    world.add("same", [1, 2], adapter("a"), max_tokens=10)
    world.step()
    world.add("high", [1, 2], adapter("b"), max_tokens=3)
    world.run()
    assert world.scheduler.num_preemptions == 0
    world.check_answers()


def stream_of_high(world: World, until: str, rows: int) -> int:
    """High-class requests for ever, so that every place is wanted, until `until` has ended; the steps it took."""
    number = 0
    for step in range(5000):
        while sum(s.request.priority == 0 for s in world.scheduler.waiting) < rows:
            world.add(f"high{number}", [number % 500], max_tokens=4)
            number += 1
        world.step()
        if until in world.ends:
            return step
    raise AssertionError("it starves")


def test_lowest_class_is_not_starved_and_not_thrown_out_for_ever() -> None:
    world, _ = timed_world("priority", max_num_seqs=2, max_wait_ms=500)
    world.add("low", [1, 2, 3], priority=9, max_tokens=30)
    world.step()
    world.step()
    num_steps = stream_of_high(world, "low", rows=4)
    assert "low" in world.ends
    # everybody in the queue waits, so the aged may be several; but after 0.5 s of waiting in all it runs to its end
    assert num_steps <= 0.5 / STEP + 30 + 3 * 8
    assert num_steps > 0.5 / STEP
    world.check_answers()


def test_many_low_ones_under_memory_pressure_all_come_to_their_ends() -> None:
    world, _ = timed_world("priority", num_blocks=14, max_model_len=40, max_num_seqs=4, max_wait_ms=200)
    for number in range(6):
        world.add(f"low{number}", [number] * 6, adapter(f"a{number % 3}"), priority=3, max_tokens=15)
    for number in range(60):
        world.add(f"high{number}", [number] * 5, adapter(f"b{number % 5}"), priority=number % 3, max_tokens=8)
        world.step()
    world.run()
    assert world.scheduler.num_preemptions > 10
    assert len(world.ends) == 66
    world.check_answers()
    world.check_nothing_held()
