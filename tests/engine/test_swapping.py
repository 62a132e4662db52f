"""Preempted sequences whose K and V wait in host memory: nothing is lost, mixed up or leaked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.batch import BlockCopy, BlockMoves, MemoryPlan, StepLoad
from lora_serve.core.errors import InternalError
from lora_serve.core.messages import FinishEvent
from lora_serve.core.request import AdapterUse, InferenceRequest
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepCost
from lora_serve.engine.swapping import Swapping, SwapSpace
from tests.engine.world import World, adapter


class Slow(StepCost):
    """A device that computes a token in a second and learns nothing."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        pass

    @property
    def seconds_per_token(self) -> float:
        return 1.0


def swapping_world(num_blocks: int, num_host_blocks: int = 64, **arguments: Any) -> World:
    """Copies cost next to nothing."""
    memory = MemoryPlan(num_host_blocks=num_host_blocks, num_windowed_host_blocks=num_host_blocks)
    world = World(num_blocks=num_blocks, memory=memory, **arguments)
    world.scheduler.swapping._cost = Slow()
    return world


def go_on_and_abort(world: World, data: st.DataObject, index: int, aborted: set[str]) -> None:
    """Some steps, and perhaps an end of one of the requests up to `index`, by its caller."""
    for _ in range(data.draw(st.integers(0, 4))):
        world.step()
        check_tables(world)
    victim = f"r{data.draw(st.integers(0, index))}"
    if data.draw(st.integers(0, 5)) == 0 and victim not in world.ends:
        aborted.add(victim)
        world.scheduler.abort(victim)


def check_tables(world: World) -> None:
    """Who holds which block and host block, as an outsider counts it between two steps."""
    scheduler = world.scheduler
    assert not [s for s in scheduler.running if s.swapped is not None], "what runs has nothing on the host"
    for number, (kind, space) in enumerate(zip(scheduler._blocks.kinds, scheduler.swapping._spaces, strict=True)):
        tables = [sequence.tables[number] for sequence in scheduler.running]
        assert [len(table) for table in tables] == [len(sequence.blocks) for sequence in scheduler.running]
        users = Counter(block for table in tables for block in table)
        assert all(kind._num_users[block] == users[block] for block in range(1, kind.num_blocks + 1))
        assert set(kind._free) == set(range(1, kind.num_blocks + 1)) - set(users)
        held = [h for s in scheduler.waiting if s.swapped is not None for h in s.swapped.host_blocks[number]]
        assert len(held) == len(set(held)) == space.num_used
        assert sorted(space._free + held) == list(range(space.num_blocks))


def flood(world: World, count: int = 4, **fields: Any) -> None:
    for index in range(count):
        world.add(f"r{index}", [index] * 8, adapter("a"), **{"max_tokens": 30, **fields})


def drain(world: World) -> None:
    while world.step() or world.loading:
        check_tables(world)
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())


def sequence_of(blocks: BlockManager, num_computed: int) -> Sequence:
    """One that runs."""
    tokens = list(range(num_computed + 1))
    sequence = Sequence(0, InferenceRequest("r", tuple(tokens)), 0, tokens, ())
    sequence.blocks.extend(blocks.allocate(blocks.num_needed(num_computed)))
    sequence.num_computed = num_computed
    return sequence


def give_back(blocks: BlockManager, sequence: Sequence) -> None:
    blocks.free(sequence.blocks)
    sequence.blocks.clear()
    sequence.num_computed = 0


# -- the table -------------------------------------------------------------------------------------------------


def test_copies_are_handed_out_once_and_in_order() -> None:
    space = SwapSpace(3)
    held = space.swap_out([7, 9])
    assert space.num_free == 1
    assert space.take_moves() == BlockMoves((BlockCopy(7, held[0]), BlockCopy(9, held[1])))
    assert not space.take_moves()
    space.swap_in(held, [4, 5])
    assert space.num_free == 1, "a host block is free only when its copy was taken"
    assert space.take_moves() == BlockMoves((), (BlockCopy(4, held[0]), BlockCopy(5, held[1])))
    space.release(held)
    assert space.num_used == 0


def test_copies_of_a_host_block_that_was_released_are_not_due() -> None:
    space = SwapSpace(2)
    held = space.swap_out([7])
    space.swap_in(held, [3])
    space.release(held)
    assert not space.take_moves()
    with pytest.raises(AssertionError, match="twice"):
        space.release(held)
    with pytest.raises(AssertionError, match="not held"):
        space.swap_in(held, [3])


def test_block_that_is_filled_whole_is_not_zeroed_even_if_it_was_fresh_for_somebody_else() -> None:
    blocks = BlockManager(2, 4)
    blocks.free(blocks.allocate(2))
    (filled,) = blocks.allocate(1, is_filled=True)
    assert set(blocks.take_fresh()) == {1, 2} - {filled}


def test_sequence_that_comes_back_and_leaves_in_one_step_is_not_copied_and_not_lost() -> None:
    blocks, space = BlockManager(8, 4), SwapSpace(8)
    swapping = Swapping([space], BlockTables(blocks), Slow(), 0.0)
    sequence = sequence_of(blocks, 10)
    swapping.swap_out(sequence)
    give_back(blocks, sequence)
    left = swapping.take_moves()
    assert (len(left.out), len(left.back)) == (3, 0)
    swapping.swap_in(sequence)
    assert (sequence.num_computed, len(sequence.blocks)) == (10, 3)
    swapping.swap_out(sequence)
    give_back(blocks, sequence)
    assert not swapping.take_moves()
    assert space.num_used == 3
    swapping.swap_in(sequence)
    back = swapping.take_moves().back
    assert [copy.block for copy in back] == sequence.blocks
    assert [copy.host_block for copy in back] == [copy.host_block for copy in left.out]
    assert space.num_used == 0
    assert sequence.swapped is None
    assert swapping.stats().num_swapped == 2


# -- preemption ------------------------------------------------------------------------------------------------


def test_preempted_sequence_goes_on_where_it_was() -> None:
    world = swapping_world(12, enable_prefix_caching=False)
    flood(world)
    drain(world)
    world.check_answers()
    swap = world.engine.stats().swap
    assert swap.num_swapped > 0
    assert swap.num_recomputed == 0
    assert world.runner.num_tokens_run == 4 * (8 + 29), "no token is computed twice"
    world.check_nothing_held()


def test_without_host_memory_everything_is_computed_again() -> None:
    world = swapping_world(12, num_host_blocks=0, enable_prefix_caching=False)
    flood(world)
    drain(world)
    world.check_answers()
    swap = world.engine.stats().swap
    assert (swap.num_swapped, swap.num_blocks) == (0, 0)
    assert swap.num_recomputed == world.scheduler.num_preemptions > 0
    assert world.runner.num_tokens_run > 4 * (8 + 29)


def test_whoever_finds_the_host_full_is_computed_again() -> None:
    world = swapping_world(12, num_host_blocks=5, enable_prefix_caching=False)
    flood(world)
    drain(world)
    world.check_answers()
    swap = world.engine.stats().swap
    assert swap.num_swapped > 0
    assert swap.num_recomputed > 0
    world.check_nothing_held()


@pytest.mark.parametrize(("seconds_per_block", "is_swapped"), [(0.01, True), (100.0, False)])
def test_the_cheaper_way_is_taken(seconds_per_block: float, is_swapped: bool) -> None:
    world = swapping_world(12, enable_prefix_caching=False)
    world.scheduler.swapping._seconds_per_block = seconds_per_block
    flood(world, 2)
    while world.scheduler.num_preemptions == 0:
        world.step()
    assert (world.engine.stats().swap.num_swapped > 0) is is_swapped
    world.run()
    world.check_answers()


def test_seconds_of_a_copy_are_learned() -> None:
    world = swapping_world(12)
    before = world.scheduler.swapping._seconds_per_block = 1.0
    flood(world)
    world.run()
    assert 0 < world.engine.stats().swap.seconds_per_block < before


def test_blocks_that_others_read_too_stay_where_they_are() -> None:
    world = swapping_world(14)
    prompt = list(range(50, 67))
    world.add("first", prompt, max_tokens=30)
    world.step()
    world.add("second", prompt, max_tokens=30)
    while world.scheduler.num_preemptions == 0:
        world.step()
    (second,) = world.scheduler.waiting
    assert second.swapped is not None
    assert second.swapped.first == (4,), "four full blocks of the prompt are shared"
    assert second.swapped.num_tokens == 35
    assert len(second.swapped.host_blocks[0]) == 9 - 4
    drain(world)
    world.check_answers()
    world.check_nothing_held()


def test_copies_behind_blocks_that_were_forgotten_meanwhile_are_given_up() -> None:
    world = swapping_world(14)
    prompt = list(range(50, 67))
    world.add("first", prompt, max_tokens=30)
    world.step()
    world.add("second", prompt, max_tokens=30)
    while world.scheduler.num_preemptions == 0:
        world.step()
    world.scheduler.prefix_cache.clear()
    drain(world)
    world.check_answers()
    world.check_nothing_held()


def test_what_came_back_is_found_by_the_next_turn() -> None:
    world = swapping_world(13)
    flood(world, 2, max_tokens=30)
    world.run()
    assert world.engine.stats().swap.num_swapped > 0
    turn = [1] * 8 + world.tokens["r1"]
    world.add("next", turn, adapter("a"), max_tokens=1)
    world.run()
    assert world.prompts["next"].num_cached_tokens == 36
    world.check_answers()


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_host_blocks_of_whoever_leaves_are_free(how: str) -> None:
    world = swapping_world(12)
    flood(world)
    while not world.engine.stats().swap.num_used:
        world.step()
    if how == "fail":
        world.take(list(world.scheduler.fail_all(InternalError("a bug"))))
    for request_id in list(world.tokens):
        world.scheduler.abort(request_id)
    world.check_nothing_held()
    world.add("after", [5] * 30)
    world.run()
    world.check_answers()


@given(st.data())
def test_any_traffic_over_a_swap_space_of_any_size_is_answered_right(data: st.DataObject) -> None:
    """The fake runner checks that every position that is read holds what its own row wrote."""
    world = swapping_world(
        data.draw(st.integers(10, 24), "blocks"),
        data.draw(st.integers(0, 20), "host blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(2, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=2,
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        window=data.draw(st.sampled_from([None, 2, 7, 12]), "window"),
    )
    aborted = set()
    for index in range(data.draw(st.integers(2, 12), "requests")):
        length = data.draw(st.integers(1, 24), "length")
        changed = data.draw(st.integers(0, 30), "first token that differs")
        prompt = [position if position < changed else 50 + index % 2 for position in range(length)]
        name = data.draw(st.sampled_from([None, "a", "b"]))
        uses = () if name is None else (AdapterUse(adapter(name), start=min(5 * (index % 2), length - 1)),)
        world.add(f"r{index}", prompt, uses, max_tokens=data.draw(st.integers(1, 16)))
        world.runner.max_tokens = data.draw(st.sampled_from([None, None, None, 5]))
        go_on_and_abort(world, data, index, aborted)
    drain(world)
    world.run()
    world.check_answers()
    assert set(world.ends) == set(world.tokens) - aborted
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()
    swap = world.engine.stats().swap
    assert swap.num_swapped + swap.num_recomputed == world.scheduler.num_preemptions
