"""The table of host memory for KV blocks: who holds which host block, and which copies are due.

The bytes are in `model/kv_cache.py`. A host block whose content goes back to the device is free only after the copies
were taken, as copies to host memory come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lora_serve.core.batch import BlockCopy, BlockMoves


class SwapSpace:
    """Host blocks 0 .. num_blocks - 1, each of them free or held."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the lowest is given out first: few pages are touched
        self._is_held = [False] * num_blocks
        self._out: dict[int, int] = {}  # host block -> block, copies that are due
        self._back: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def move_out(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Host blocks for these, which must be free; the copies are due with the next moves."""
        assert len(blocks) <= self.num_free, "host blocks were not checked before they were taken"
        held = tuple(self._free.pop() for _ in blocks)
        for host_block, block in zip(held, blocks, strict=True):
            self._is_held[host_block] = True
            self._out[host_block] = block
        return held

    def move_back(self, held: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies to the device are due. The host blocks stay held until they are released."""
        for host_block, block in zip(held, blocks, strict=True):
            assert self._is_held[host_block], "a host block that nobody holds is read"
            self._back[host_block] = block

    def stay(self, held: Iterable[int]) -> None:
        """Copies of these to the device are not due any more."""
        for host_block in held:
            self._back.pop(host_block, None)

    def release(self, held: Iterable[int]) -> None:
        """They are free, and no copy of them is due."""
        for host_block in held:
            assert self._is_held[host_block], "a host block was released twice"
            self._is_held[host_block] = False
            self._out.pop(host_block, None)
            self._back.pop(host_block, None)
            self._free.append(host_block)

    def take_moves(self) -> BlockMoves:
        """The copies that are due; whoever gets them does them before anything is written."""
        moves = BlockMoves(_copies(self._out), _copies(self._back))
        self._out, self._back = {}, {}
        return moves


def _copies(due: dict[int, int]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(block, host_block) for host_block, block in due.items())
