"""Rows of a model whose tokens see a window of those before: what no later one sees is given back, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.model_spec import num_unseen
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.swapping import Swapping, SwapSpace
from tests.engine.fake_launcher import FakeLauncher
from tests.engine.test_swapping import Slow, check_tables, drain, flood, give_back, sequence_of, swapping_world
from tests.engine.world import World

WINDOW = 10
PROMPT = list(range(50, 91))


def held(world: World) -> list[int]:
    """How many blocks each running row holds in layers with a window."""
    return [sum(block > 0 for block in one.windowed_blocks or one.blocks) for one in world.scheduler.running]


@pytest.mark.parametrize("window", [1, 4, 5, 8, 11, 50])
def test_blocks_that_no_token_behind_sees_are_counted(window: int) -> None:
    for num_computed in range(60):
        seen = range(max(0, num_computed - window + 1), num_computed + 1)  # by the next token, itself included
        assert num_unseen(window, num_computed, 4) == seen[0] // 4
    assert num_unseen(None, 59, 4) == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("window", [2, WINDOW, 16, None])
def test_long_row_holds_the_blocks_of_its_window(window: int | None, enable_prefix_caching: bool) -> None:
    world = World(window=window, enable_prefix_caching=enable_prefix_caching)
    world.add("long", PROMPT, max_tokens=100)
    most, length = 0, 0
    while world.step():
        check_tables(world)
        if world.tokens["long"] and world.scheduler.running:
            most, length = max(most, *held(world)), len(world.scheduler.running[0].blocks)
    world.check_answers()
    assert length == -(-140 // 4), "its places stay those of all its tokens"
    assert most == (35 if window is None else -(-window // 4) + 1)
    world.check_nothing_held()


def test_rows_that_had_to_take_turns_run_together() -> None:
    preemptions = []
    for window in (None, WINDOW):
        world = World(24, window=window)
        for i in range(4):
            world.add(f"r{i}", [i] * 8, max_tokens=40)
        world.run()
        world.check_answers()
        preemptions.append(world.scheduler.num_preemptions)
    assert preemptions[0] > 0 == preemptions[1]


def test_long_prompt_is_let_in_where_its_window_has_room() -> None:
    most = []
    for window in (None, WINDOW):
        world = World(30, window=window, max_num_batched_tokens=16, max_model_len=112)
        for i in range(6):
            world.add(f"r{i}", [i] * 100, max_tokens=12)
        most.append(0)
        while world.step():
            most[-1] = max(most[-1], len(world.scheduler.running))
        world.check_answers()
        world.check_nothing_held()
        assert world.scheduler.num_preemptions == 0
    assert most[0] == 1
    assert most[1] > 2


def test_what_was_given_back_is_found_while_it_is_free() -> None:
    world = World(window=WINDOW)
    world.add("first", PROMPT, max_tokens=30)
    for _ in range(12):
        world.step()
    assert held(world) == [4]
    world.add("second", PROMPT, max_tokens=30)
    world.run()
    world.check_answers()
    assert world.prompts["second"].num_cached_tokens == 40
    world.check_nothing_held()


def test_block_that_another_row_reads_stays_its_own() -> None:
    world = World(16, window=WINDOW, max_num_batched_tokens=64)
    world.add("first", PROMPT[:9], max_tokens=40)
    world.step()
    world.add("second", PROMPT[:9], max_tokens=2)
    world.step()
    first, second = world.scheduler.running
    assert first.blocks[:2] == second.blocks[:2]
    shared = second.blocks[:2]
    while second in world.scheduler.running:
        assert second.blocks[:2] == shared
        world.step()
        check_tables(world)
    while world.step():
        check_tables(world)
    world.check_answers()


def test_swapped_row_brings_back_its_window_though_what_was_before_is_gone() -> None:
    world = swapping_world(14, enable_prefix_caching=False, window=WINDOW)
    flood(world, 4, max_tokens=60)
    drain(world)
    world.check_answers()
    swap = world.engine.stats().swap
    assert swap.num_swapped > 0 == swap.num_recomputed
    assert world.runner.num_tokens_run == 4 * (8 + 59), "no token is computed twice"
    world.check_nothing_held()


def dropping(blocks: BlockManager) -> Sequence:
    """One of 14 tokens in blocks of 4, that has given back the first two."""
    sequence = sequence_of(blocks, 14)
    blocks.free(sequence.blocks[:2])
    sequence.blocks[:2], sequence.num_dropped = [0, 0], 2
    return sequence


def test_row_that_comes_back_and_leaves_at_once_loses_nothing() -> None:
    blocks, space = BlockManager(8, 4, WINDOW), SwapSpace(8)
    swapping, sequence = Swapping([space], BlockTables(blocks), Slow(), 0.0), dropping(blocks)
    swapping.swap_out(sequence)
    for found in (0, 1):
        give_back(blocks, sequence)
        sequence.num_dropped = 0
        sequence.blocks.extend(blocks.allocate(found))  # that the prefix cache has found meanwhile
        sequence.num_computed = 4 * found
        swapping.swap_in(sequence)
        assert (sequence.blocks[:2], sequence.num_dropped, sequence.num_computed) == ([0, 0], 2, 14)
        assert all(sequence.blocks[2:])
        assert blocks.num_free == 6
        swapping.swap_out(sequence)
    assert space.num_used == 2


def test_row_whose_beginning_was_found_and_lost_again_is_computed_again() -> None:
    blocks = BlockManager(8, 4, WINDOW)
    swapping, sequence = Swapping([SwapSpace(8)], BlockTables(blocks), Slow(), 0.0), dropping(blocks)
    swapping.swap_out(sequence)
    give_back(blocks, sequence)
    sequence.num_dropped = 0
    sequence.blocks.extend(blocks.allocate(3))
    sequence.num_computed = 12
    swapping.swap_in(sequence)
    assert (sequence.blocks[:2], sequence.num_dropped, sequence.num_computed) == ([0, 0], 2, 14)
    assert all(sequence.blocks[2:])
    assert blocks.num_free == 6
    swapping.swap_out(sequence)
    give_back(blocks, sequence)
    sequence.num_dropped = 0
    swapping.swap_in(sequence)
    assert (sequence.blocks, sequence.num_computed, sequence.swapped) == ([], 0, None)


@pytest.mark.parametrize("pools", [{"num_blocks": 64}, {"num_blocks": 200, "num_windowed": 56}])
def test_row_that_finds_its_prompt_takes_its_window_alone_where_others_hold_the_rest(pools: dict[str, int]) -> None:
    """All of the pool is cached or held: nobody fails, and nothing is let in that has no room."""
    world = World(**pools, window=WINDOW, max_num_batched_tokens=16, max_model_len=256)  # type: ignore[arg-type]
    prompt = [50 + i % 40 for i in range(200)]
    world.add("cached", prompt, max_tokens=1)
    world.run()
    for i in range(3):
        world.add(f"r{i}", [i] * 9, max_tokens=60)
    for _ in range(4):
        world.step()
    world.add("found", [*prompt, 1, 2, 3], max_tokens=20)
    most = 0
    while world.step():
        check_tables(world)
        most = max(most, *held(world), 0)
    world.check_answers()
    assert world.prompts["found"].num_cached_tokens > 100
    assert most <= -(-(WINDOW + 16) // 4) + 1
    assert world.scheduler.num_preemptions == 0
    world.check_nothing_held()


def test_prompt_is_found_by_its_last_blocks_where_its_first_were_given_away() -> None:
    world = World(40, window=WINDOW, max_num_batched_tokens=16)
    world.add("first", PROMPT, max_tokens=2)
    world.step()
    (sequence,) = world.scheduler.running
    world.run()
    for key in sequence.block_keys[:2]:
        world.scheduler._blocks.kinds[0]._forget_key(key)
    world.add("second", [*PROMPT, 1, 2], max_tokens=20)
    world.run()
    world.check_answers()
    assert world.prompts["second"].num_cached_tokens == 40


def test_row_that_ends_with_an_error_leaves_nothing_that_can_be_found() -> None:
    world = World(40, window=WINDOW)
    world.add("first", PROMPT, max_tokens=30)
    for _ in range(8):
        world.step()
    (sequence,) = world.scheduler.running
    assert sequence.num_dropped > 0
    world.scheduler.prefix_cache.invalidate(sequence)
    assert world.scheduler._blocks.kinds[0].num_known == 0


@pytest.mark.parametrize("window", [5, WINDOW])
def test_guesses_and_steps_launched_ahead_see_all_that_they_may(window: int) -> None:
    guessing = World(window=window, speculate="3", next_token=lambda _, history: 10 + len(history) % 5)
    launching = World(24, window=window, launcher=FakeLauncher())
    for world in (guessing, launching):
        for i in range(3):
            world.add(f"r{i}", [i] * 9, max_tokens=50)
        world.run()
        world.check_answers()
        world.check_nothing_held()
    assert guessing.runner.num_accepted > 20


@given(st.data())
def test_any_traffic_is_answered_right_ahead_or_not(data: st.DataObject) -> None:
    """The fake runner checks that every position which a row's window shows holds what its own row wrote."""
    world = World(
        data.draw(st.integers(10, 24), "blocks"),
        window=data.draw(st.integers(2, 24), "window"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(2, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        launcher=FakeLauncher() if data.draw(st.booleans(), "launched ahead") else None,
    )
    for index in range(data.draw(st.integers(2, 9), "requests")):
        length = data.draw(st.integers(1, 24), "length")
        changed = data.draw(st.integers(0, 30), "first token that differs")
        prompt = [position if position < changed else 50 + index % 2 for position in range(length)]
        world.add(f"r{index}", prompt, max_tokens=data.draw(st.integers(1, 16)))
        for _ in range(data.draw(st.integers(0, 4))):
            world.step()
    world.run()
    world.check_answers()
    world.check_nothing_held()
