"""Requests that are answered by one vector: one step each, no block, in buckets where rows are padded."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from lora_serve.core.batch import Batch
from lora_serve.core.errors import AdapterUnavailableError, InternalError, NumericalError, RequestTimeoutError
from lora_serve.core.messages import ErrorEvent, FinishEvent
from lora_serve.core.model_spec import PoolingSpec
from lora_serve.core.request import AdapterUse, FinishReason, OnCold, PoolingParams, Task
from lora_serve.engine.batcher import padded_length
from tests.engine.fake_runner import EXPLOSION, POISON
from tests.engine.world import World, adapter

POOL = PoolingParams()
RAGGED = PoolingSpec(Task.EMBED, 2)
PADDED = PoolingSpec(Task.EMBED, 2, is_ragged=False)
KINDS = pytest.mark.parametrize("pooling", [RAGGED, PADDED], ids=["ragged", "padded"])


def pooling_world(pooling: PoolingSpec = RAGGED, **settings: Any) -> World:
    """An engine without a single KV block."""
    return World(0, pooling=pooling, **settings)


def padded_to(row_length: int) -> int:
    return max(16, 1 << (row_length - 1).bit_length())


def check_batches(world: World, *, is_padded: bool) -> None:
    """No batch touches a block, is too large, or mixes buckets."""
    limit = world.settings.max_num_batched_tokens
    for batch in world.runner.batches:
        assert batch.fresh_blocks == ()
        assert all(row.block_table == () for row in batch.rows)
        assert len(batch.rows) <= world.settings.max_num_seqs
        lengths = [len(row.token_ids) for row in batch.rows]
        if is_padded:
            assert len({padded_to(length) for length in lengths}) == 1, lengths
            lengths = [padded_to(length) for length in lengths]
        assert sum(lengths) <= limit or len(lengths) == 1, lengths
    assert world.scheduler.prefix_cache.num_queries == 0
    world.check_nothing_held()


@pytest.mark.crossed
@KINDS
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("wait", [0, 2])
def test_every_request_gets_its_own_vector_in_any_traffic(pooling: PoolingSpec, seed: int, wait: float) -> None:
    generator = random.Random(seed)
    world = pooling_world(
        pooling, auto_load=False, batch_wait_ms=wait, preferred_batch_size=generator.choice([None, 3]), max_loras=2
    )
    refs = [adapter(f"a{index}") for index in range(5)]
    left: set[str] = set()
    for index in range(80):
        tokens = [generator.randrange(500) for _ in range(generator.choice([1, 5, 16, 17, 30, 60, 150]))]
        tokens[0] = generator.choice([tokens[0]] * 12 + [POISON])
        types = tuple(generator.randrange(2) for _ in tokens) if generator.random() < 0.3 else ()
        uses: tuple[AdapterUse, ...] = ()
        if generator.random() < 0.7:
            chosen = generator.sample(refs, generator.choice([1, 1, 2]))
            uses = tuple(AdapterUse(ref, generator.choice([0.5, 1.0])) for ref in chosen)
        fallback = () if uses and generator.random() < 0.3 else None
        extra = {"on_cold": OnCold.BASE, "fallback": ()} if fallback is not None else {}
        world.add(f"r{index}", tokens, uses, pooling=PoolingParams(types), **extra)
        if generator.random() < 0.1:
            victim = f"r{generator.randrange(index + 1)}"
            if victim not in world.ends:
                left.add(victim)
                world.scheduler.abort(victim)
        while world.loading and generator.random() < 0.5:
            fails = generator.random() < 0.1
            world.finish_load(world.loading[0], AdapterUnavailableError("gone") if fails else None)
        if generator.random() < 0.5:
            world.step()
    deadline = time.monotonic() + 20
    while world.scheduler.waiting or world.scheduler.running:
        assert time.monotonic() < deadline, "it does not come to an end"
        while world.loading:
            world.finish_load(world.loading[0])
        world.step()
    assert set(world.ends) | left == {f"r{index}" for index in range(80)}
    assert not set(world.ends) & left
    assert sum(isinstance(event, FinishEvent) for event in world.ends.values()) > 30
    world.check_answers()
    check_batches(world, is_padded=pooling is PADDED)


def test_answer_is_prompt_vector_and_end_in_one_step() -> None:
    world = pooling_world()
    world.add("r", [1, 2, 3], pooling=PoolingParams((0, 1, 1)))
    assert world.step()
    assert world.ends["r"] == FinishEvent("r", FinishReason.STOP)
    assert world.vectors["r"] == world.expected_vector("r")
    assert (world.prompts["r"].num_cached_tokens, world.prompts["r"].prompt_logprobs) == (0, None)
    assert not world.step()


def test_row_longer_than_a_step_takes_runs_whole_and_alone() -> None:
    world = pooling_world(max_num_batched_tokens=32)
    world.add("before", [1] * 10, pooling=POOL)
    world.add("long", [2] * 100, pooling=POOL)
    world.add("after", [3] * 10, pooling=POOL)
    world.run()
    assert [[len(row.token_ids) for row in batch.rows] for batch in world.runner.batches] == [[10], [100], [10]]
    world.check_answers()


def test_rows_that_do_not_fit_whole_wait_for_the_next_step() -> None:
    world = pooling_world(max_num_batched_tokens=32)
    for index in range(4):
        world.add(f"r{index}", [index] * 12, pooling=POOL)
    world.run()
    assert [len(batch.rows) for batch in world.runner.batches] == [2, 2]


def test_padded_rows_count_with_their_padding() -> None:
    world = pooling_world(PADDED, max_num_batched_tokens=64)
    for index in range(4):
        world.add(f"r{index}", [index] * 17, pooling=POOL)  # 32 each
    world.run()
    assert [len(batch.rows) for batch in world.runner.batches] == [2, 2]


def test_padded_rows_share_a_batch_with_their_own_bucket_only() -> None:
    world = pooling_world(PADDED, max_num_batched_tokens=512)
    for index, length in enumerate((5, 40, 16, 64, 1)):
        world.add(f"r{index}", [index] * length, pooling=POOL)
    world.run()
    assert [[len(row.token_ids) for row in batch.rows] for batch in world.runner.batches] == [[5, 16, 1], [40, 64]]


def scheduled(world: World, now: float) -> list[list[int]]:
    """Lengths of the rows of what is started at `now`, batch by batch; each is run to its end."""
    lengths = []
    while (batch := world.scheduler.schedule(now)[0]) is not None:
        assert isinstance(batch, Batch)
        lengths.append([len(row.token_ids) for row in batch.rows])
        world.take(world.scheduler.update(world.runner.run(batch), batch, now))
    return lengths


def test_each_bucket_has_its_own_window() -> None:
    world = pooling_world(PADDED, batch_wait_ms=100, max_num_batched_tokens=512)
    world.add("short", [1] * 5, pooling=POOL, arrival_time=10.0)
    world.add("long", [1] * 50, pooling=POOL, arrival_time=10.05)
    world.add("short too", [1] * 6, pooling=POOL, arrival_time=10.09)
    assert scheduled(world, 10.09) == []
    assert world.scheduler.next_deadline(10.09) == pytest.approx(10.1)
    assert scheduled(world, 10.11) == [[5, 6]]
    assert world.scheduler.next_deadline(10.11) == pytest.approx(10.15)
    assert scheduled(world, 10.16) == [[50]]


def test_full_bucket_starts_before_its_window_ends_and_others_go_on_waiting() -> None:
    world = pooling_world(PADDED, batch_wait_ms=100, preferred_batch_size=2, max_num_batched_tokens=512)
    world.add("short", [1] * 5, pooling=POOL, arrival_time=10.0)
    world.add("long", [1] * 50, pooling=POOL, arrival_time=10.0)
    assert scheduled(world, 10.01) == []
    world.add("long too", [1] * 33, pooling=POOL, arrival_time=10.01)
    assert scheduled(world, 10.01) == [[50, 33]]


def test_bucket_is_full_when_its_padding_fills_the_step() -> None:
    world = pooling_world(PADDED, batch_wait_ms=100, max_num_batched_tokens=64)
    world.add("one", [1] * 17, pooling=POOL, arrival_time=10.0)
    assert scheduled(world, 10.01) == []
    world.add("two", [1] * 17, pooling=POOL, arrival_time=10.01)
    assert scheduled(world, 10.01) == [[17, 17]]


@KINDS
def test_cold_adapter_holds_up_nobody_else(pooling: PoolingSpec) -> None:
    world = pooling_world(pooling, auto_load=False)
    cold = adapter("cold")
    world.add("cold", [1] * 5, cold, pooling=POOL)
    world.add("base", [2] * 5, pooling=POOL)
    world.step()
    assert list(world.ends) == ["base"]
    world.finish_load(cold)
    world.run()
    assert world.order == ["base", "cold"]
    world.check_answers()
    world.check_nothing_held()


def test_adapters_of_a_batch_are_mixed() -> None:
    world = pooling_world(max_loras=4, max_num_batched_tokens=64)
    for index in range(4):
        world.add(f"r{index}", [index] * 4, adapter(f"a{index}"), pooling=POOL)
    world.add("base", [9] * 4, pooling=POOL)
    world.run()
    assert max(batch.num_adapters for batch in world.runner.batches) == 4
    world.check_answers()
    world.check_nothing_held()


def test_request_that_left_while_it_waited_is_never_run() -> None:
    world = pooling_world(batch_wait_ms=1000)
    world.add("r", [1, 2], pooling=POOL)
    world.scheduler.abort("r")
    assert not world.step()
    assert world.runner.batches == []
    world.check_nothing_held()


def test_row_without_numbers_ends_alone() -> None:
    world = pooling_world()
    world.add("bad", [POISON, 1], pooling=POOL)
    world.add("good", [1, 2], pooling=POOL)
    world.run()
    assert isinstance(world.error("bad"), NumericalError)
    world.check_answers()
    world.check_nothing_held()


def test_row_that_breaks_the_forward_pass_ends_alone() -> None:
    world = pooling_world()
    world.add("bad", [EXPLOSION, 1], pooling=POOL)
    world.add("good", [1, 2], pooling=POOL)
    world.run()
    assert isinstance(world.error("bad"), InternalError)
    assert not isinstance(world.ends["good"], ErrorEvent)
    world.check_answers()
    world.check_nothing_held()


def test_deadline_ends_a_request_that_waits() -> None:
    world = pooling_world(batch_wait_ms=60_000)
    world.add("r", [1, 2], pooling=POOL, deadline=time.monotonic() - 1)
    world.step()
    assert isinstance(world.error("r"), RequestTimeoutError)
    world.check_nothing_held()


def test_pooled_rows_run_beside_generating_ones_and_leave_their_blocks_alone() -> None:
    world = World(8, max_num_batched_tokens=64)
    world.add("text", [1] * 20, max_tokens=10)
    world.step()
    held = world.engine.stats().num_free_blocks
    for index in range(5):
        world.add(f"r{index}", [1] * 20, pooling=POOL)
    world.step()
    assert {f"r{index}" for index in range(2)} <= set(world.vectors)
    assert world.engine.stats().num_free_blocks >= held - 1
    world.run()
    world.check_answers()
    world.check_nothing_held()


def test_time_to_the_vector_is_observed_as_that_to_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    world = pooling_world()
    seen: list[float] = []
    monkeypatch.setattr(world.scheduler.batcher, "observe_first_token", seen.append)
    world.add("r", [1, 2], pooling=POOL, arrival_time=10.0)
    scheduled(world, 10.5)
    assert seen == [0.5]


@pytest.mark.parametrize(("length", "bucket"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (129, 256)])
def test_bucket_is_the_next_power_of_two(length: int, bucket: int) -> None:
    world = pooling_world(PADDED)
    world.add("r", [1] * length, pooling=POOL)
    assert padded_length(world.scheduler.waiting[0]) == bucket
