"""Slots that are owed: the others go on, and whoever waits gets the slots that are free first_to_finish."""

from __future__ import annotations

from lora_serve.core.batch import SlotRef
from lora_serve.core.request import AdapterUse
from lora_serve.engine.slots import SlotTable
from tests.engine.policies.traffic import STEP, timed_world
from tests.engine.world import World, adapter


def table(num_slots: int, *names: str, max_bytes: int | None = None, num_bytes: int = 10) -> SlotTable:
    slots = SlotTable(num_slots, max_bytes)
    for name in names:
        assert slots.place(adapter(name, num_bytes)) is not None
    return slots


def digests(*names: str) -> frozenset[str]:
    return frozenset(adapter(name).digest for name in names)


def test_soonest_is_whoever_has_the_fewest_steps_left() -> None:
    slots = table(3, "a", "b", "c")
    left = {adapter("a").digest: 9, adapter("b").digest: 2, adapter("c").digest: 5}
    assert slots.first_to_finish([adapter("x")], left) == digests("b")
    assert slots.first_to_finish([adapter("x"), adapter("y")], left) == digests("b", "c")
    assert slots.first_to_finish([adapter("b"), adapter("y")], left) == digests("c"), "what is wanted stays"


def test_soonest_makes_room_in_bytes_too_and_spares_the_pinned() -> None:
    slots = table(8, "a", "b", "c", max_bytes=30)
    slots.set_pinned(adapter("a").digest, True)
    assert slots.first_to_finish([adapter("x", 20)], {}) == digests("b", "c")
    assert table(8, "a", max_bytes=30).first_to_finish([adapter("x", 20)], {}) == frozenset()


def busy_world(policy: str = "fcfs") -> World:
    """Two slots with two streams of rows each, that never end."""
    world, _ = timed_world(policy, max_loras=2, max_num_seqs=4, max_wait_ms=1e6)
    return world


def keep_busy(world: World, names: str, number: int) -> int:
    while len(world.scheduler.waiting) < 6:
        world.add(f"{number}", [number], adapter(names[number % len(names)]), max_tokens=6)
        number += 1
    return number


def test_row_that_waits_for_a_slot_is_passed_only_so_often_and_others_run_on() -> None:
    world = busy_world()
    number = keep_busy(world, "ab", 0)
    for _ in range(10):
        world.step()
        number = keep_busy(world, "ab", number)
    world.add("tail", [1], adapter("t"), max_tokens=2)
    num_steps = 0
    rows = []
    while "tail" not in world.prompts:
        number = keep_busy(world, "ab", number)
        world.step()
        num_steps += 1
        rows.append(len(world.runner.batches[-1].rows))
    assert num_steps <= 6 + 6 + 4 * 6, "the queue before it, and the rows of one slot"
    assert min(rows) >= 2, "the other slot's rows go on"
    world.scheduler.fail_all(AssertionError())  # type: ignore[arg-type]
    world.check_nothing_held()


def test_set_of_adapters_gets_all_of_its_slots_though_single_ones_never_end() -> None:
    world = busy_world()
    number = keep_busy(world, "ab", 0)
    world.step()
    world.add("set", [1], (AdapterUse(adapter("s"), 0.5), AdapterUse(adapter("t"), 0.5)), max_tokens=2)
    for _ in range(80):
        number = keep_busy(world, "ab", number)
        world.step()
        if "set" in world.ends:
            break
    assert "set" in world.ends
    world.check_answers()


def test_row_that_waited_max_wait_is_owed_a_slot_though_few_passed() -> None:
    world, clock = timed_world("fcfs", max_loras=1, max_num_seqs=64, max_num_batched_tokens=64, max_wait_ms=100)
    world.add("hot", [0], adapter("h"), max_tokens=8)
    world.step()
    world.add("tail", [1], adapter("t"), max_tokens=2)
    arrived, number = clock.now, 0
    while "tail" not in world.prompts:
        world.add(f"hot{number}", [number], adapter("h"), max_tokens=8)
        number += 1
        world.step()
        assert clock.now - arrived <= 0.1 + 12 * STEP
    assert all(isinstance(slot, SlotRef) for slot, _ in world.runner.slots.values())
