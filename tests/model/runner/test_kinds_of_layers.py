"""Steps of a model whose layers are of two kinds, each with blocks of its own: captured, packed, zeroed and moved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, BlockCopy, BlockMoves, Row
from lora_serve.model.attention import varlen
from lora_serve.model.kv_cache import KVCache, KVHeads, KVShape
from lora_serve.model.runner.step_buffers import GraphShape, StepBuffers
from tests.contracts.test_attention import older_varlen
from tests.model.recorded_call import WatchedPrograms
from tests.model.runner.test_step_graphs import GREEDY, World, same
from tests.tiers import mostly_nightly

CPU = torch.device("cpu")
TWO_KINDS = KVShape((KVHeads(2, 4), KVHeads(2, 4), KVHeads(1, 8)), torch.float32, (1, 0, 1))


def row(i: int, start: int, count: int, first: int, second: int, dropped: int, *adapters: Any) -> Row:
    """Tokens from `start` on, in blocks from `first` on of one kind and `second` on of the other, which lacks some."""
    width = -(-(start + count) // 4)
    windowed = (0,) * dropped + tuple(range(second + dropped, second + width))
    tokens = tuple((7 * i + 3 * position) % 50 for position in range(start, start + count))
    return Row(i, tokens, start, tuple(range(first, first + width)), adapters, GREEDY, None, windowed_table=windowed)


@pytest.mark.parametrize("reads_in_place", mostly_nightly([False, True], False))  # the interpreter takes its time
def test_replays_read_each_kinds_own_blocks(reads_in_place: bool, tmp_path: Path) -> None:
    """A window of 6: behind 9 tokens the first block is gone, and behind 13 the second."""
    layers = ["sliding_attention", "full_attention"]
    world = World(tmp_path, ("q_proj",), "gemma3_text", layer_types=layers)
    assert world.plain._cache.shape.num_kinds == 2
    if reads_in_place:
        backend: Any = varlen.Backend(world.plain._cache, older_varlen, (torch.float32,))
        backend._paged._programs = WatchedPrograms(backend._paged._programs, world.recorders)
        world.plain._model._attention = backend
    a = world.load("a", 0, 1)
    places = [(1, 21), (5, 11), (9, 1)]
    for layer in range(2):
        for pool in world.plain._cache.layer(layer):
            pool[1:] = torch.nan  # of owners before
    for i, (first, second) in enumerate(places):
        prompt = row(i, 0, 14, first, second, 0)
        world.plain.run(Batch((prompt,), prompt.block_table, BlockMoves(), prompt.windowed_table))
    if reads_in_place:
        world.agree([row(1, 14, 1, 5, 11, 2, a), row(2, 10, 4, 9, 1, 1), row(0, 11, 2, 1, 21, 1)])
        return
    world.agree([row(0, 14, 1, 1, 21, 2, a), row(1, 13, 1, 5, 11, 1)])
    world.agree([row(2, 14, 1, 9, 1, 2), row(0, 9, 1, 1, 21, 0)])
    right, wrong = row(0, 14, 1, 1, 21, 2), row(0, 14, 1, 1, 11, 2)
    found = [world.captured.run(Batch((one,), ()))[0] for one in (right, wrong)]
    assert not same(*found), "other blocks of the second kind alone would answer otherwise"


def test_tables_of_both_kinds_are_those_of_buffers_that_are_filled_for_the_first_time() -> None:
    def new_buffers() -> StepBuffers:
        return StepBuffers(GraphShape(6, 64, 8, with_lora=True), 4, [99, 88], CPU)

    generator, kept = random.Random(3), new_buffers()
    lengths = [1] * 8
    for _ in range(60):
        for i, length in enumerate(lengths):
            lengths[i] = min(30, length + generator.randrange(4)) if generator.random() < 0.9 else 1
        chosen = sorted(generator.sample(range(8), generator.randrange(1, 7)))
        num_long = generator.randrange(min(len(chosen), 3))
        counts = [2 if place >= len(chosen) - num_long else 1 for place in range(len(chosen))]
        rows = [
            row(i, lengths[i], n, 10 * i + 1, 7 * i + 1, max(0, lengths[i] - 9) // 4)
            for i, n in zip(chosen, counts, strict=True)
        ]
        fresh = new_buffers()
        assert kept.fill(rows) == fresh.fill(rows)
        assert torch.equal(kept._memory, fresh._memory)
        step = kept.step()
        assert step.windowed is not None
        for of_kind, kind in ((step, 0), (step.windowed, 1)):
            for i, one in enumerate(rows[: len(rows) - num_long]):
                table = one.tables[kind]
                assert of_kind.decode.block_table[i, : len(table)].tolist() == list(table)
                assert of_kind.cache_positions[i] == table[one.start // 4] * 4 + one.start % 4
            if of_kind.tiled is not None:
                long = of_kind.tiled.block_table[6 : 6 + num_long]
                assert all(
                    line[: len(one.tables[kind])].tolist() == list(one.tables[kind])
                    for line, one in zip(long, rows[len(rows) - num_long :], strict=True)
                )
            idle = slice(len(rows) - num_long, 6)
            assert set(of_kind.cache_positions[idle].tolist()) <= {4 * (99, 88)[kind]}


def test_blocks_of_a_kind_are_zeroed_and_moved_in_its_layers_alone() -> None:
    cache = KVCache(TWO_KINDS, 3, 2, CPU, num_spare=1)
    cache.resize(6, 2, (4, 1))
    assert [len(cache.layer(layer)[0]) for layer in range(3)] == [5, 7, 5]
    assert (cache.spare_blocks(1, 2), cache.spare_blocks(1, 2, 1)) == ([(6,)], [(4,)])
    for layer in range(3):
        for pool in cache.layer(layer):
            pool.fill_(layer + 1)
    before = [cache.layer(layer)[0].clone() for layer in range(3)]
    cache.move(BlockMoves((BlockCopy(2, 0, 1), BlockCopy(2, 1, 0))))
    cache.zero([2, 5], [2])
    zeroed = [(cache.layer(layer)[0].flatten(1) == 0).all(1).nonzero().flatten().tolist() for layer in range(3)]
    assert zeroed == [[2], [2, 5], [2]]
    cache.move(BlockMoves((), (BlockCopy(2, 0, 1), BlockCopy(2, 1, 0), BlockCopy(5, 1, 0))))
    assert all(torch.equal(cache.layer(layer)[0], before[layer]) for layer in range(3))
    cache.zero([1])
    assert all((cache.layer(layer)[1][1] == 0).all() for layer in range(3)), "without a word the same of both"


def test_bytes_of_a_block_are_those_of_its_kinds_layers() -> None:
    assert TWO_KINDS.block_bytes(2, 0) == 2 * 2 * 8 * 4
    assert TWO_KINDS.block_bytes(2, 1) == 2 * 2 * 16 * 4
    assert TWO_KINDS.block_bytes(2) == 2 * 2 * 24 * 4
