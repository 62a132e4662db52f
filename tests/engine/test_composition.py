"""Rows of several adapters: all of their slots or none, whoever else wants some of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.adapter import AdapterRef, AdapterTraits
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError
from lora_serve.core.messages import ErrorEvent, Pin
from lora_serve.core.request import AdapterUse, OnCold
from tests.engine.world import World, adapter


def uses(names: str, scale: float = 0.5) -> tuple[AdapterUse, ...]:
    return tuple(AdapterUse(adapter(name), scale * (index + 1)) for index, name in enumerate(names))


def test_row_of_several_adapters_runs_beside_rows_of_one_and_of_none() -> None:
    world = World()
    world.add("set", [1, 2], uses("abc"))
    world.add("other set", [1, 2], uses("cb"))
    world.add("one", [1, 2], adapter("a"))
    world.add("base", [1, 2])
    world.run()
    world.check_answers()
    assert max(len(batch.rows) for batch in world.runner.batches) == 4
    assert max(batch.num_adapters for batch in world.runner.batches) == 3
    world.check_nothing_held()


def test_scale_changes_the_answer() -> None:
    world = World()
    world.add("half", [1, 2], uses("a", 0.5))
    world.add("whole", [1, 2], uses("a", 1.0))
    world.run()
    world.check_answers()
    assert world.tokens["half"] != world.tokens["whole"]


def test_set_waits_for_all_of_its_adapters_and_holds_no_slot_meanwhile() -> None:
    world = World(max_loras=2)
    world.add("long", [1], adapter("x"), max_tokens=20)
    world.step()
    world.add("set", [2], uses("ab"), max_tokens=2)
    world.add("one", [3], adapter("a"), max_tokens=2)
    world.run()
    world.check_answers()
    assert world.order[-1] == "set", "it needs both slots, and the other runs on"
    world.check_nothing_held()


def test_two_sets_that_are_each_half_here_do_not_wait_for_each_other() -> None:
    world = World(max_loras=4, max_cpu_loras=4)
    world.add("first", [1], uses("abcd"))
    world.add("second", [2], uses("efgh"))
    world.add("third", [3], uses("aceg"))
    world.run()
    world.check_answers()
    assert len(world.ends) == 3
    world.check_nothing_held()


def test_set_that_pinned_adapters_leave_no_room_for_is_refused_in_words() -> None:
    world = World(max_loras=3)
    replies = [world.command(Pin(adapter(name))) for name in "xy"]
    world.run()
    assert replies == [[None], [None]]
    world.add("set", [1], uses("ab"))
    world.add("with a pinned one", [1], uses("xa"))
    world.run()
    end = world.ends["set"]
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, AdapterUnavailableError)
    assert "2 hold pinned adapters" in str(end.error)
    assert not isinstance(world.ends["with a pinned one"], ErrorEvent)


def test_on_cold_fail_names_every_adapter_that_is_cold() -> None:
    world = World(auto_load=False)
    world.add("set", [1], uses("ab"), on_cold=OnCold.FAIL)
    end = world.ends["set"]
    assert isinstance(end, ErrorEvent)
    assert "`a`, `b` are still being loaded" in str(end.error)
    assert {ref.name for ref in world.loading} == {"a", "b"}


def test_one_broken_adapter_ends_the_whole_set_and_no_other_row() -> None:
    world = World(auto_load=False)
    world.add("set", [1], uses("ab"))
    world.add("fine", [1], adapter("b"))
    world.step()
    broken: LoraServeError = AdapterUnavailableError("gone")
    for ref in list(world.loading):
        world.finish_load(ref, broken if ref.name == "a" else None)
    world.run()
    assert isinstance(world.ends["set"], ErrorEvent)
    assert not isinstance(world.ends["fine"], ErrorEvent)
    world.check_nothing_held()


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abcdefgh"), max_size=3), st.integers(1, 6)), min_size=1, max_size=12)
)
def test_any_mix_of_sets_comes_to_its_end(requests: list[tuple[set[str], int]]) -> None:
    world = World(max_loras=3, max_cpu_loras=4, max_num_seqs=3)
    for index, (names, length) in enumerate(requests):
        world.add(f"r{index}", [index], uses("".join(sorted(names))), max_tokens=length)
    world.run()
    world.check_answers()
    assert len(world.ends) == len(requests)
    world.check_nothing_held()


@pytest.mark.parametrize(
    ("prompt", "start"),
    [((7, 8, 1), 0), ((1, 7, 8), 1), ((7, 8, 7, 8, 9), 2), ((7, 9, 8), None), ((7,), None), ((), None)],
)
def test_activated_adapter_starts_at_the_last_of_its_invocations(prompt: tuple[int, ...], start: int | None) -> None:
    ref = AdapterRef("default", "a", 1, "sha256:a", 8, 10, AdapterTraits(invocation_tokens=(7, 8)))
    assert ref.start_in(prompt) == start
    assert adapter("plain").start_in(prompt) == 0


def test_sets_that_push_one_another_out_of_tight_memory_still_all_run() -> None:
    """Found by chance: with four places in host memory these went round for ever."""
    world = World(max_loras=3, max_cpu_loras=4, max_num_seqs=3)
    sets = ["feb", "g", "fgd", "", "", "cbh", "f", "", "cah", "", "chd", "fc"]
    for index, names in enumerate(sets):
        world.add(f"r{index}", [index], uses(names), max_tokens=1 + index % 6)
    world.run(limit=200)
    world.check_answers()
    assert len(world.ends) == len(sets)
    world.check_nothing_held()
