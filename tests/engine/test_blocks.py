"""The table of KV blocks."""

from __future__ import annotations

import pytest

from lora_serve.engine.blocks import BlockManager


def test_block_zero_is_nobodys_and_each_block_has_one_owner() -> None:
    blocks = BlockManager(5, 4)
    taken = blocks.allocate(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert blocks.num_free == 0
    with pytest.raises(AssertionError):
        blocks.allocate(1)


def test_reused_blocks_are_reported_as_fresh_once() -> None:
    blocks = BlockManager(3, 4)
    first = blocks.allocate(2)
    assert blocks.take_fresh() == tuple(first)
    assert blocks.take_fresh() == ()
    blocks.free(first)
    again = blocks.allocate(3)
    assert blocks.take_fresh() == tuple(again)


@pytest.mark.parametrize(("tokens", "needed"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_needed(tokens: int, needed: int) -> None:
    assert BlockManager(3, 4).num_needed(tokens) == needed
