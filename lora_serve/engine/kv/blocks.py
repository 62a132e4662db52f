"""The table of KV blocks: their users, and the content that free blocks still hold. The bytes are in
`model/kv_cache.py`.

A block whose K and V are computed can be found by a key (`prefix_cache.py`), also while it is free, until it is given
to another sequence: the free list is the cache, and the longest free block is given away first (as in vLLM's
`BlockPool`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Blocks 1 .. num_blocks of `block_size` tokens each; block 0 is padding and never allocated.

    A block has any number of users; only an allocated block, never a shared one, may be written.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))  # the first is given away first
        self._num_users = [0] * (num_blocks + 1)
        self._fresh: list[int] = []
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parent_of: dict[bytes, bytes] = {}  # a root has none

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_known(self) -> int:
        """Blocks with a key, free or not."""
        return len(self._by_key)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, *, is_filled: bool = False) -> list[int]:
        """Takes `count` free blocks, which lose their keys and are zeroed before the next step.

        `is_filled`: they will be overwritten whole before that, so they need not be zeroed.
        """
        assert count <= self.num_free, "blocks were not checked before they were taken"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._num_users[block] = 1
            if block in self._key_of:
                self._forget_key(self._key_of[block])
        if is_filled:  # one may have been fresh for a sequence that was preempted before the step
            self._fresh = [block for block in self._fresh if block not in blocks]
        else:
            self._fresh.extend(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reader to each of these known blocks."""
        for block in blocks:
            assert block in self._key_of, "only a known block can be shared"
            self._num_users[block] += 1
            self._free.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """Removes a sequence from its blocks: its last block is given away first, its first one is kept longest."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            assert self._num_users[block] >= 0, "a block was freed twice"
            if self._num_users[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(
                        block, last=False
                    )  # it cannot be found: it is given away before those that can

    def take_fresh(self) -> tuple[int, ...]:
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of keys."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_shared_of(self, blocks: Sequence[int]) -> int:
        """The number of blocks at the beginning of a sequence that have other users."""
        return next((i for i, block in enumerate(blocks) if self._num_users[block] == 1), len(blocks))

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """The number of these blocks that are free, so that sharing them takes from the free list."""
        return sum(self._num_users[block] == 0 for block in blocks)

    def publish(self, block: int, key: bytes, parent: bytes | None) -> None:
        """Makes a computed block known by `key`, unless another block is or its parent is not known."""
        if key in self._by_key or not (parent is None or parent in self._by_key):
            return
        assert self._num_users[block] == 1, "only its writer has a block that is not known yet"
        assert block not in self._key_of, "a block is published once"
        self._by_key[key], self._key_of[block] = block, key
        if parent is not None:
            self._parent_of[key] = parent

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the keys of these blocks and of all blocks computed from them."""
        children: dict[bytes, list[bytes]] = defaultdict(list)
        for key, parent in self._parent_of.items():
            children[parent].append(key)
        lost = [self._key_of[block] for block in blocks if block in self._key_of]
        while lost:
            key = lost.pop()
            lost.extend(children.pop(key, ()))
            if key in self._by_key:
                self._forget_key(key)

    def forget_all(self) -> None:
        for key in list(self._by_key):
            self._forget_key(key)

    def _forget_key(self, key: bytes) -> None:
        del self._key_of[self._by_key.pop(key)]
        self._parent_of.pop(key, None)
