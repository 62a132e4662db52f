"""Steps that fit into the device's memory, and what becomes of those that did not after all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.batch import (
    ActivationModel,
    Batch,
    MemoryLoad,
    MemoryPlan,
    Row,
    RowOutput,
    SampleInput,
    memory_load,
)
from lora_serve.core.errors import DeviceMemoryError, NumericalError
from lora_serve.core.messages import FinishEvent, TokenLogprobs
from lora_serve.core.request import PoolingParams, SamplingParams
from lora_serve.engine.execution import run_in_parts
from lora_serve.engine.scheduling.step_rows import MemoryGuard
from lora_serve.engine.slots import SlotTable
from tests.engine.fake_runner import EXPLOSION, POISON
from tests.engine.world import World, adapter

GREEDY = SampleInput(SamplingParams(temperature=0.0), 0, 0, ())


def plan(room: int, **activations: float) -> MemoryPlan:
    """`room`: bytes beside weights and KV."""
    return MemoryPlan(1100 + room, 1000, 100, activations=ActivationModel(**activations))


def row(sequence_id: int, count: int, start: int = 0, targets: bool = False, sample: bool = True) -> Row:
    tokens = tuple(range(start, start + count))
    return Row(sequence_id, tokens, start, (1, 2), (), GREEDY if sample else None, tokens if targets else None)


# -- what a step is estimated at -------------------------------------------------------------------------------


def test_load_of_a_step_counts_padded_decode_rows_and_the_largest_chunk() -> None:
    rows = [row(0, 1, start=9), row(1, 1, start=99), row(2, 8, start=20), row(3, 16, sample=False)]
    load = memory_load(rows)
    assert (load.num_tokens, load.num_logits) == (26, 3)
    assert load.num_decode_keys == 2 * 100
    assert (load.longest_chunk, load.num_scores) == (28, 256)
    assert memory_load([row(0, 8, targets=True)]).num_logits == 8


def test_estimate_is_linear_in_the_load() -> None:
    model = ActivationModel(1, 10, 100, 1000, 2, 3, 4)
    load = MemoryLoad(5, 4, 3, 2, longest_decode=50, longest_chunk=7, num_scores=6)
    assert model.num_bytes(load) == 1 + 50 + 400 + 3000 + 2 * 100 + 3 * 7 + 4 * 6


# -- composition -----------------------------------------------------------------------------------------------


def biggest(world: World, model: ActivationModel) -> int:
    return max(model.num_bytes(memory_load(batch.rows)) for batch in world.runner.batches)


def test_no_batch_is_composed_that_would_not_fit() -> None:
    memory = plan(1000, per_token=100)
    world = World(memory=memory)
    for index in range(6):
        world.add(f"r{index}", [index] * 9, max_tokens=4)
    world.run()
    world.check_answers()
    assert biggest(world, memory.activations) == 1000, "all of the room is used, and no more"
    assert len(world.ends) == 6


def test_logits_count_so_prompts_that_want_them_all_run_in_smaller_chunks() -> None:
    memory = plan(1000, per_token=10, per_logit=90)
    world = World(memory=memory)
    world.add("plain", list(range(30)), max_tokens=1)
    world.run()
    assert len(world.runner.batches) == 1
    world.add("wants all", list(range(40, 70)), max_tokens=1, prompt_logprobs=1)
    world.run()
    assert [batch.num_tokens for batch in world.runner.batches[1:]] == [10, 10, 10]
    assert biggest(world, memory.activations) <= 1000


def test_each_row_counts_with_the_logits_of_its_next_token() -> None:
    memory = plan(1000, per_logit=300)
    world = World(memory=memory)
    for index in range(6):
        world.add(f"r{index}", [index], max_tokens=4)
    world.run()
    world.check_answers()
    assert biggest(world, memory.activations) == 900


def test_adapters_that_are_resident_take_room_from_steps() -> None:
    world = World(memory=plan(1000, per_token=100))
    world.add("r", list(range(20)), adapter("a", num_bytes=500), max_tokens=1)
    world.run()
    world.check_answers()
    assert max(batch.num_tokens for batch in world.runner.batches) == 5
    stats = world.engine.stats().memory
    assert (stats.limit, stats.weights, stats.kv, stats.adapters) == (2100, 1000, 100, 500)
    assert stats.activations <= 500
    assert stats.largest == 2100


def test_adapters_of_a_step_take_room_from_its_rows() -> None:
    memory = plan(1000, per_adapter=400)
    world = World(memory=memory)
    for name in "abc":
        world.add(name, [1, 2, 3], adapter(name, num_bytes=0), max_tokens=6)
    world.run()
    world.check_answers()
    assert max(batch.num_adapters for batch in world.runner.batches) == 2


def test_memory_for_nothing_at_all_still_moves_everybody_on_token_by_token_and_in_turn() -> None:
    world = World(memory=plan(-50, per_token=100))
    for index in range(3):
        world.add(f"r{index}", [index] * 3, max_tokens=4)
    world.run()
    world.check_answers()
    assert len(world.ends) == 3
    assert all(batch.num_tokens == 1 for batch in world.runner.batches)


def test_adapter_is_not_made_resident_beside_rows_that_leave_no_memory_for_it() -> None:
    world = World(memory=plan(1000, per_token=100))
    for index in range(5):
        world.add(f"r{index}", [index], max_tokens=9)
    world.step()
    world.add("big", [7, 7], adapter("big", num_bytes=600), max_tokens=3)
    world.run()
    world.check_answers()
    assert len(world.ends) == 6
    assert world.engine.stats().memory.largest <= 2100


def test_rows_that_found_no_room_are_the_first_in_the_next_step() -> None:
    world = World()
    for index in range(6):
        world.add(f"r{index}", [index], max_tokens=20)
    world.step()
    world.runner.max_tokens = 5
    for _ in range(12):
        world.step()
        counts = [len(world.tokens[s.request.request_id]) for s in world.scheduler.running]
        assert max(counts) - min(counts) <= 1, "decoding rows advance together"
    assert world.runner.batches[-1].num_tokens == 3
    world.run()
    world.check_answers()
    assert len(world.ends) == 6


def test_slots_hold_no_more_bytes_than_the_plan_has_left_for_them() -> None:
    world = World(memory=MemoryPlan(adapter_bytes=25), max_loras=8)
    for name in "abcd":
        world.add(name, [1], adapter(name, num_bytes=10), max_tokens=2)
    world.run()
    world.check_answers()
    assert len(world.ends) == 4
    assert world.residency.slots.num_bytes <= 25


# -- out of memory ---------------------------------------------------------------------------------------------


def runner_of(limit: int, calls: list[int]) -> object:
    def run(batch: Batch) -> list[RowOutput]:
        calls.append(batch.num_tokens)
        if batch.num_tokens > limit:
            raise DeviceMemoryError("none left")
        return [
            RowOutput(
                row.sequence_id,
                row.token_ids[-1] if row.sample else None,
                prompt_logprobs=tuple(TokenLogprobs(token, 0.0, 1, ()) for token in row.prompt_targets or ()),
            )
            for row in batch.rows
        ]

    return run


def test_parts_give_what_the_whole_would_have_given() -> None:
    batch = Batch((row(0, 5, targets=True), row(1, 1), row(2, 7), row(3, 6, sample=False)), (1, 2))
    whole = run_in_parts(runner_of(100, []), batch)  # type: ignore[arg-type]
    for limit in (1, 2, 3, 6, 12):
        calls: list[int] = []
        assert run_in_parts(runner_of(limit, calls), batch) == whole  # type: ignore[arg-type]
        assert sum(count for count in calls if count <= limit) == 19, "every token is run once"


def test_fresh_blocks_are_never_zeroed_after_something_was_written() -> None:
    seen: list[tuple[int, ...]] = []

    def run(batch: Batch) -> list[RowOutput]:
        if batch.num_tokens > 2:
            raise DeviceMemoryError("none left")
        seen.append(batch.fresh_blocks)
        return [RowOutput(row.sequence_id, None) for row in batch.rows]

    run_in_parts(run, Batch((row(0, 5), row(1, 4)), (7, 8)))
    assert seen[0] == (7, 8)
    assert not any(seen[1:])


def test_what_cannot_be_cut_ends_with_words_and_alone() -> None:
    pooled = Row(0, (1, 2, 3), 0, (), (), None, None, pool=PoolingParams())
    outputs = run_in_parts(runner_of(2, []), Batch((pooled, row(1, 1)), ()))  # type: ignore[arg-type]
    assert isinstance(outputs[0].error, DeviceMemoryError)
    assert outputs[1].error is None
    (alone,) = run_in_parts(runner_of(0, []), Batch((row(1, 4),), ()))  # type: ignore[arg-type]
    assert isinstance(alone.error, DeviceMemoryError)


def test_step_that_ran_out_of_memory_loses_nothing() -> None:
    world = World()
    world.runner.max_tokens = 3
    for index in range(6):
        world.add(f"r{index}", [index] * (3 + 4 * index), adapter("ab"[index % 2]), max_tokens=5)
    world.run()
    world.check_answers()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    assert world.engine.stats().memory.num_out_of_memory > 0
    world.check_nothing_held()


def test_after_a_lack_of_memory_steps_are_smaller_for_a_while() -> None:
    world = World()
    world.add("long", list(range(100)), max_tokens=90)
    world.runner.max_tokens = 20
    world.step()
    assert world.engine.stats().memory.max_tokens == 16
    world.step()
    assert world.runner.batches[-1].num_tokens == 16
    world.runner.max_tokens = None
    for _ in range(70):
        world.step()
    assert world.engine.stats().memory.max_tokens is None
    world.add("later", list(range(100, 140)), max_tokens=1)
    world.step()
    assert world.runner.batches[-1].num_tokens == 32
    world.run()
    world.check_answers()


def test_other_failures_beside_a_lack_of_memory_end_only_their_row() -> None:
    world = World()
    world.runner.max_tokens = 4
    world.add("good", [1] * 9, adapter("a"))
    world.add("bad", [EXPLOSION])
    world.add("not a number", [3, POISON, 3])
    world.run()
    world.check_answers()
    assert isinstance(world.ends["good"], FinishEvent)
    assert "could not be computed" in str(world.error("bad"))
    assert isinstance(world.error("not a number"), NumericalError)
    world.check_nothing_held()


def test_limit_sinks_with_every_failure_and_rises_after_good_steps() -> None:
    guard = MemoryGuard(MemoryPlan(), SlotTable(1))
    assert guard.max_tokens(512) == 512
    guard.ran_out(400)
    guard.ran_out(200)
    assert guard.max_tokens(512) == 100
    assert guard.max_tokens(50) == 50
    seen = []
    while guard.stats().max_tokens is not None:
        guard.ran_well()
        seen.append(guard.max_tokens(512))
    assert seen == sorted(seen)
    assert seen[-1] == 512
    assert len(seen) > 64
    assert guard.stats().num_out_of_memory == 2


@given(st.data())
def test_any_traffic_under_any_lack_of_memory_is_answered_right(data: st.DataObject) -> None:
    memory = plan(data.draw(st.integers(-100, 3000), "room"), per_token=100, per_decode_key=5, per_score=1)
    world = World(
        num_blocks=data.draw(st.integers(12, 40), "blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 6), "rows"),
        memory=memory,
        max_loras=2,
    )
    for index in range(data.draw(st.integers(1, 10), "requests")):
        name = data.draw(st.sampled_from([None, "a", "b"]))
        length = data.draw(st.integers(1, 24))
        world.add(f"r{index}", [index] * length, name and adapter(name, 100), max_tokens=data.draw(st.integers(1, 14)))
        world.runner.max_tokens = data.draw(st.sampled_from([None, None, 1, 3, 9]))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.runner.max_tokens = data.draw(st.sampled_from([None, 2, 5]))
    world.run()
    world.check_answers()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    assert len(world.ends) == len(world.tokens)
    world.check_nothing_held()
    room = max((memory.limit or 0) - 1100 - 200, 0)
    for batch in world.runner.batches:
        fits = memory.activations.num_bytes(memory_load(batch.rows)) <= room + 200
        assert fits or batch.num_tokens == 1
