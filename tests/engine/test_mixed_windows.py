"""Rows of a model some of whose layers have a window: a table for each kind, each with blocks of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.batch import Batch, BlockCopy, BlockMoves
from lora_serve.core.messages import FinishEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.sequence import Sequence
from tests.engine.fake_launcher import FakeLauncher
from tests.engine.test_swapping import check_tables, drain, flood, go_on_and_abort, swapping_world
from tests.engine.world import World, adapter

WINDOW = 10
PROMPT = list(range(50, 91))


def held(world: World) -> list[tuple[int, int]]:
    """How many blocks of each kind each running row holds."""
    return [
        tuple(sum(block > 0 for block in table) for table in sequence.tables)  # type: ignore[misc]
        for sequence in world.scheduler.running
    ]


def windowed_that_one_row_needs(window: int, num_tokens: int) -> int:
    return -(-window // 4) + 3 + -(-num_tokens // 4)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("window", [2, WINDOW, 16])
def test_long_row_holds_all_blocks_of_one_kind_and_its_window_of_the_other(
    window: int, enable_prefix_caching: bool
) -> None:
    world = World(window=window, num_windowed=24, enable_prefix_caching=enable_prefix_caching)
    world.add("long", PROMPT, max_tokens=100)
    most = (0, 0)
    while world.step():
        check_tables(world)
        if world.tokens["long"] and world.scheduler.running:
            most = max(most[0], held(world)[0][0]), max(most[1], held(world)[0][1])
    world.check_answers()
    assert most == (35, -(-window // 4) + 1)
    world.check_nothing_held()


def test_rows_beyond_the_second_kinds_pool_run_together_if_their_windows_fit() -> None:
    """Four rows of 48 tokens hold 48 blocks of the first kind; of the second kind 24 are enough, and 10 are not."""
    preemptions = []
    for num_windowed in (24, 10):
        world = World(64, window=WINDOW, num_windowed=num_windowed, max_num_batched_tokens=16)
        for i in range(4):
            world.add(f"r{i}", [i] * 8, max_tokens=40)
        while world.step():
            check_tables(world)
        world.check_answers()
        world.check_nothing_held()
        preemptions.append(world.scheduler.num_preemptions)
    assert preemptions[0] == 0 < preemptions[1]


@pytest.mark.parametrize(("num_blocks", "num_windowed"), [(34, 64), (160, 14)])
def test_prompts_are_let_in_as_far_as_each_kind_has_room(num_blocks: int, num_windowed: int) -> None:
    """The first pool holds one row of 112 tokens; the second two windows, and a step. What was let in stays."""
    world = World(
        num_blocks, window=WINDOW, num_windowed=num_windowed, max_num_batched_tokens=16, max_model_len=112,
        enable_prefix_caching=False,
    )  # fmt: skip
    for i in range(5):
        world.add(f"r{i}", [i] * 100, max_tokens=12)
    most = 0
    while world.step():
        check_tables(world)
        most = max(most, len(world.scheduler.running))
    world.check_answers()
    world.check_nothing_held()
    assert world.scheduler.num_preemptions == 0
    assert most == (1 if num_blocks == 34 else 2)


def test_prompt_is_found_up_to_where_both_kinds_know_what_is_seen() -> None:
    found = []
    for lost in (range(0), range(7), range(8, 9), range(9, 10), range(10)):
        world = World(64, window=WINDOW, num_windowed=40)
        world.add("first", PROMPT, max_tokens=1)
        world.step()
        (sequence,) = world.scheduler.running
        world.run()
        for index in lost:
            world.scheduler._blocks.kinds[1]._forget_key(sequence.block_keys[index])
        world.add("second", PROMPT, max_tokens=20)
        while world.step():
            check_tables(world)
        world.check_answers()
        world.check_nothing_held()
        found.append(world.prompts["second"].num_cached_tokens)
    # of block 10's first token a window of 10 shows blocks 7, 8 and 9
    assert found == [40, 40, 32, 36, 0]


def test_prompt_whose_beginning_the_first_kind_has_lost_is_computed() -> None:
    world = World(64, window=WINDOW, num_windowed=40)
    world.add("first", PROMPT, max_tokens=1)
    world.step()
    (sequence,) = world.scheduler.running
    world.run()
    world.scheduler._blocks.kinds[0]._forget_key(sequence.block_keys[3])
    world.add("second", PROMPT, max_tokens=20)
    world.run()
    world.check_answers()
    assert world.prompts["second"].num_cached_tokens == 12


def test_row_that_ends_with_an_error_leaves_nothing_that_can_be_found_in_any_kind() -> None:
    world = World(40, window=WINDOW, num_windowed=30)
    world.add("first", PROMPT, max_tokens=30)
    for _ in range(8):
        world.step()
    (sequence,) = world.scheduler.running
    assert all(kind.num_known > 0 for kind in world.scheduler._blocks.kinds)
    world.scheduler.prefix_cache.invalidate(sequence)
    assert [kind.num_known for kind in world.scheduler._blocks.kinds] == [0, 0]


def test_swapped_row_brings_back_all_of_one_kind_and_its_window_of_the_other() -> None:
    world = swapping_world(40, enable_prefix_caching=False, window=WINDOW, num_windowed=40)
    flood(world, 4, max_tokens=60)
    drain(world)
    world.check_answers()
    swap = world.engine.stats().swap
    assert swap.num_swapped > 0 == swap.num_recomputed
    assert world.runner.num_tokens_run == 4 * (8 + 59), "no token is computed twice"
    copied = [[copy.kind for copy in batch.moves.out] for batch in world.runner.batches if batch.moves.out]
    assert all(kinds.count(0) > kinds.count(1) > 0 for kinds in copied)
    world.check_nothing_held()


def test_what_came_back_behind_a_gap_is_not_offered_as_if_it_were_there() -> None:
    """The prefix cache finds less of the second kind than the row had given back: there is nothing in between."""
    world = swapping_world(40, window=WINDOW, num_windowed=40)
    flood(world, 4, max_tokens=60)
    while not (left := [s for s in world.scheduler.waiting if s.num_preemptions]):
        world.step()
    (sequence,) = left
    assert sequence.swapped is not None
    assert sequence.swapped.num_dropped > 4
    for key in sequence.block_keys[4:]:
        for kind in world.scheduler._blocks.kinds:
            kind.forget([key])
    while sequence not in world.scheduler.running:
        world.step()
    assert sequence.num_published >= 16
    drain(world)
    world.check_answers()
    world.check_nothing_held()


def test_fresh_blocks_of_each_kind_are_zeroed_by_what_runs_first() -> None:
    tables = BlockTables(BlockManager(8, 4), BlockManager(8, 4, WINDOW))
    tables.kinds[1].allocate(2, is_filled=True)
    tables.add(Sequence(0, InferenceRequest("r", (1,)), 0, [1], ()), 2)
    fresh, windowed = tables.take_fresh()
    assert (fresh, windowed) == ((1, 2), (3, 4))
    batch = Batch((), fresh, BlockMoves((BlockCopy(1, 1),)), windowed)
    assert batch.first_part(()) == Batch((), fresh, BlockMoves(), windowed)
    tables.give_back_fresh(batch)
    assert tables.take_fresh() == [fresh, windowed]


def test_room_in_host_memory_is_asked_of_each_kind() -> None:
    world = swapping_world(40, enable_prefix_caching=False, window=WINDOW, num_windowed=40)
    world.scheduler.swapping._spaces[1]._free.clear()
    flood(world, 4, max_tokens=60)
    world.run()
    world.check_answers()
    assert world.engine.stats().swap.num_swapped == 0 < world.scheduler.num_preemptions


@pytest.mark.parametrize("window", [5, WINDOW])
def test_guesses_and_steps_launched_ahead_see_all_that_they_may(window: int) -> None:
    token = lambda _, history: 10 + len(history) % 5  # noqa: E731
    guessing = World(window=window, num_windowed=40, speculate="3", next_token=token)
    launching = World(60, window=window, num_windowed=24, launcher=FakeLauncher())
    for world in (guessing, launching):
        for i in range(3):
            world.add(f"r{i}", [i] * 9, max_tokens=50)
        while world.step():
            pass
        world.check_answers()
        world.check_nothing_held()
    assert guessing.runner.num_accepted > 20


@given(st.data())
def test_any_traffic_is_answered_right_in_pools_of_any_size(data: st.DataObject) -> None:
    """The fake runner checks that every position which a kind shows a row holds what its own row wrote there."""
    window, num_tokens = data.draw(st.integers(2, 24), "window"), data.draw(st.integers(16, 40), "tokens")
    least = min(10, windowed_that_one_row_needs(window, num_tokens))
    is_ahead = data.draw(st.booleans(), "launched ahead")
    world = swapping_world(
        data.draw(st.integers(10, 24), "blocks"),
        0 if is_ahead else data.draw(st.sampled_from([0, 3, 20]), "host blocks"),
        window=window,
        num_windowed=data.draw(st.integers(least, 24), "windowed blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(2, 6), "rows"),
        max_num_batched_tokens=num_tokens,
        max_loras=2,
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        speculate="off" if is_ahead else data.draw(st.sampled_from(["off", "3"]), "guesses"),
        launcher=FakeLauncher() if is_ahead else None,
    )
    aborted = set()
    for index in range(data.draw(st.integers(2, 10), "requests")):
        length = data.draw(st.integers(1, 24), "length")
        changed = data.draw(st.integers(0, 30), "first token that differs")
        prompt = [position if position < changed else 50 + index % 2 for position in range(length)]
        name = data.draw(st.sampled_from([None, "a", "b"]))
        tenant = data.draw(st.sampled_from(["default", "other"]))
        world.add(
            f"r{index}", prompt, None if name is None else adapter(name), tenant=tenant,
            max_tokens=data.draw(st.integers(1, 16)),
        )  # fmt: skip
        if not is_ahead:
            world.runner.max_tokens = data.draw(st.sampled_from([None, None, None, 5]))
        go_on_and_abort(world, data, index, aborted)
    world.run()
    check_tables(world)
    world.check_answers()
    assert set(world.ends) == set(world.tokens) - aborted
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()
    for kind in world.scheduler._blocks.kinds:
        assert {block: key for key, block in kind._by_key.items()} == kind._key_of
