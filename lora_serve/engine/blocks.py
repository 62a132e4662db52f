"""The table of KV blocks: who owns which index. The bytes are in `model/kv_cache.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockManager:
    """Blocks 1 .. num_blocks of `block_size` tokens each; block 0 is padding and belongs to nobody."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(1, num_blocks + 1))
        self._fresh: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, which must be free; they are zeroed before the next step."""
        assert count <= self.num_free, "blocks were not checked before they were taken"
        blocks = [self._free.popleft() for _ in range(count)]
        self._fresh.extend(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)

    def take_fresh(self) -> tuple[int, ...]:
        """The blocks allocated since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh
