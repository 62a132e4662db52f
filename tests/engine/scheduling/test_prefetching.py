"""Adapters of waiting requests are asked for before it is their turn, and nobody has to go for that."""

from __future__ import annotations

import pytest

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import AdapterCommand, FinishEvent, Prefetch, Resize, SetTenantBudgets
from lora_serve.core.request import OnCold
from lora_serve.core.tenant import TenantBudget
from tests.engine.fake_constraints import FakeConstraints, grammar
from tests.engine.world import World, adapter


def names(world: World) -> list[str]:
    return [ref.name for ref in world.loading]


def test_loads_begin_in_the_policys_order_though_no_row_is_free() -> None:
    world = World(auto_load=False, max_num_seqs=1)
    world.add("runs", [1], max_tokens=50)
    world.step()
    world.add("late", [1], adapter("late"), priority=3)
    world.add("soon", [1], adapter("soon"), priority=-3)
    world.add("middle", [1], adapter("middle"))
    world.step()
    assert "runs" not in world.ends
    assert names(world) == ["soon", "middle", "late"]


def test_no_more_is_asked_for_than_the_host_has_room_for() -> None:
    world = World(auto_load=False, max_num_seqs=1, adapter_host_memory=30, max_loras=1)
    world.add("runs", [1], max_tokens=100)
    world.step()
    for index in range(6):
        world.add(f"r{index}", [1], adapter(f"a{index}"))
    world.step()
    assert names(world) == ["a0", "a1", "a2"]
    world.finish_load(adapter("a0"))
    world.step()
    assert names(world) == ["a1", "a2", "a3"], "a0 went on to the free slot"
    world.finish_load(adapter("a1"))
    world.step()
    assert names(world) == ["a2", "a3"], "a1 stays in host memory until a slot is free"


def test_small_adapter_does_not_overtake_one_that_the_host_has_no_room_for() -> None:
    world = World(auto_load=False, max_num_seqs=1, adapter_host_memory=35)
    world.add("runs", [1], max_tokens=100)
    world.step()
    for index in range(4):
        world.add(f"r{index}", [1], adapter(f"a{index}"))
    world.add("small", [1], adapter("small", num_bytes=5))
    world.step()
    assert names(world) == ["a0", "a1", "a2"]


def test_slots_are_filled_a_few_a_step_until_none_is_free() -> None:
    world = World(auto_load=False, max_num_seqs=1, max_loras=4)
    world.add("runs", [1], max_tokens=100)
    world.step()
    for index in range(5):
        world.add(f"r{index}", [1], adapter(f"a{index}"))
    world.step()
    for ref in list(world.loading):
        world.finish_load(ref)
    filled = []
    for _ in range(3):
        world.step()
        filled.append(len(world.runner.slots))
    assert filled == [2, 4, 4]


def test_free_slots_are_filled_ahead_and_nobody_is_evicted_for_it() -> None:
    world = World(auto_load=False, max_num_seqs=1, max_loras=2)
    world.add("resident", [1], adapter("resident"), max_tokens=2)
    world.step()
    world.finish_load(adapter("resident"))
    world.run()
    world.add("runs", [1], max_tokens=100)
    world.step()
    for name in ("one", "two"):
        world.add(name, [1], adapter(name))
        world.step()
        world.finish_load(adapter(name))
        world.step()
    assert "runs" not in world.ends
    assert {digest for _, digest in world.runner.slots.values()} == {"sha256:resident", "sha256:one"}
    world.run()
    world.check_answers()
    world.check_nothing_held()


def test_queue_is_not_looked_through_again_while_nothing_changes() -> None:
    world = World(auto_load=False, max_num_seqs=1)
    world.add("runs", [1], max_tokens=100)
    for index in range(200):
        world.add(f"r{index}", [1], adapter(f"a{index}", num_bytes=1))
    world.step()
    assert len(world.loading) == 64
    asked: list[object] = []
    world.scheduler._cold_start.ask = lambda sequence: asked.append(sequence) is None
    for _ in range(5):
        world.step()
    assert not asked
    world.finish_load(world.loading[0])
    world.step()
    assert len(asked) == 64


def test_room_of_a_load_that_failed_goes_to_the_next_though_nobody_ends() -> None:
    """The request goes on with its fallback, and waits on."""
    world = World(auto_load=False, max_num_seqs=1, adapter_host_memory=10)
    world.add("runs", [1], max_tokens=100)
    world.step()
    world.add("first", [1], adapter("broken"), max_cold_wait=60.0, on_cold=OnCold.BASE, fallback=())
    world.add("second", [1], adapter("next"))
    world.step()
    assert names(world) == ["broken"]
    world.finish_load(adapter("broken"), AdapterUnavailableError("no bytes"))
    world.step()
    assert names(world) == ["next"]
    assert not world.ends


def test_prefetch_to_host_memory_takes_no_slot() -> None:
    world = World(auto_load=False)
    replies = world.command(Prefetch(adapter("a"), to="host"))
    assert names(world) == ["a"]
    assert not replies
    world.finish_load(adapter("a"))
    world.step()
    assert replies == [None]
    assert "sha256:a" in world.residency.host
    assert not list(world.residency.slots.infos())


@pytest.mark.parametrize(
    ("takes_it_away", "gives_room"),
    [
        (Resize(adapter_memory=5, adapter_host_memory=5), Resize(adapter_memory=1000, adapter_host_memory=1000)),
        (SetTenantBudgets((TenantBudget("default", at_most=5),)), SetTenantBudgets(())),
    ],
    ids=["limits", "budgets"],
)
def test_what_a_command_took_from_a_request_that_waits_is_loaded_again_though_nobody_else_comes(
    takes_it_away: AdapterCommand, gives_room: AdapterCommand
) -> None:
    """It waits for its grammar, so that nothing runs; host memory has room for one adapter, which is another's now."""
    world = World(auto_load=False, constraints=FakeConstraints(), adapter_host_memory=10)
    world.add("r", [1, 2, 3], adapter("a"), grammar=grammar(range(5), range(5)))
    world.step()
    world.finish_load(adapter("a"))
    world.step()
    world.command(Prefetch(adapter("b"), to="host"))
    world.finish_load(adapter("b"))
    world.step()
    assert [slot.name for slot in world.engine.stats().slots] == ["a"]
    world.command(takes_it_away)
    world.step()
    assert not world.residency.is_here("sha256:a")
    world.command(gives_room)
    world.step()
    assert names(world) == ["a"]
    world.finish_load(adapter("a"))
    world.finish_grammar("r")
    world.run()
    assert isinstance(world.ends["r"], FinishEvent)
    world.check_answers()
