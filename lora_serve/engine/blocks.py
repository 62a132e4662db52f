"""The tables of KV blocks: who has which, by kind of layers. The bytes are in `model/kv_cache.py`."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator

from lora_serve.core.batch import Batch
from lora_serve.core.model_spec import num_unseen
from lora_serve.engine.sequence import Sequence


class BlockManager:
    """Blocks 1 .. num_blocks of `block_size` tokens each in layers of one kind; block 0 is padding, never allocated.

    A block has any number of users; only an allocated block, never a shared one, may be written.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        """`window`: the most tokens that one sees in these layers; None: all before it."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
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

    def num_unseen(self, num_computed: int) -> int:
        """The blocks at a sequence's beginning that no token behind its first `num_computed` sees."""
        return num_unseen(self.window, num_computed, self.block_size)

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

    def free(self, blocks: list[int]) -> None:
        """Removes a sequence from its blocks: its last block is given away first, its first one is kept longest. 0
        stands for one that it gave back before.
        """
        for block in reversed(blocks):
            if block == 0:
                continue
            self._num_users[block] -= 1
            assert self._num_users[block] >= 0, "a block was freed twice"
            if self._num_users[block] == 0:
                self._free[block] = None
                if block not in self._key_of:  # it cannot be found: it is given away before those that can
                    self._free.move_to_end(block, last=False)

    def take_fresh(self) -> tuple[int, ...]:
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def give_back_fresh(self, blocks: Iterable[int]) -> None:
        """Takes back blocks of a step that was not run: nothing has zeroed them."""
        self._fresh.extend(blocks)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of keys; 0 stands for those that no later token sees, known
        or not.
        """
        if self.window is not None:
            return self._find_seen([self._by_key.get(key, 0) for key in keys])
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _find_seen(self, blocks: list[int]) -> list[int]:
        end = num_known = 0
        for index, block in enumerate(blocks, start=1):
            num_known = num_known + 1 if block else 0
            if num_known and num_known >= index - self.num_unseen(index * self.block_size):
                end = index
        unseen = self.num_unseen(end * self.block_size)
        return [0] * unseen + blocks[unseen:end]

    def num_shared_of(self, blocks: list[int]) -> int:
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

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drops these keys and those of all blocks computed from theirs."""
        children: dict[bytes, list[bytes]] = defaultdict(list)
        for key, parent in self._parent_of.items():
            children[parent].append(key)
        lost = [*keys]
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


class BlockTables:
    """The blocks of sequences: in each kind of layers a table as long as the sequence.

    Layers in which a token sees all before it are the first kind, those with a window the last. What no later token
    sees in these is given back, and 0 stands in its place.
    """

    def __init__(self, *kinds: BlockManager) -> None:
        self.kinds = kinds
        self.block_size = kinds[0].block_size

    @property
    def num_free(self) -> int:
        """The blocks by which a sequence can grow."""
        return min(kind.num_free for kind in self.kinds)

    @property
    def num_unused(self) -> int:
        """The free blocks of the first kind, or as small a part of them as is free of the other."""
        most = self.kinds[0].num_blocks
        return min(kind.num_free * most // max(1, kind.num_blocks) for kind in self.kinds)

    def of(self, sequence: Sequence) -> Iterator[tuple[BlockManager, list[int]]]:
        """The sequence's table in each kind."""
        return zip(self.kinds, sequence.tables, strict=False)

    def num_needed(self, num_tokens: int) -> int:
        return self.kinds[0].num_needed(num_tokens)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """The blocks that a sequence lacks, in each kind, for its first `num_tokens` tokens."""
        return max(0, self.num_needed(num_tokens) - len(sequence.blocks))

    def add(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence `count` more blocks, which must be free."""
        for kind, table in self.of(sequence):
            table.extend(kind.allocate(count))

    def cut(self, sequence: Sequence, count: int) -> None:
        """Takes from a sequence what is behind its first `count` blocks."""
        for kind, table in self.of(sequence):
            kind.free(table[count:])
            del table[count:]

    def drop(self, sequence: Sequence, count: int) -> None:
        """Gives back a sequence's first `count` blocks in layers with a window, as far as it holds them."""
        before, table = sequence.num_dropped, sequence.tables[len(self.kinds) - 1]
        if count > before:
            self.kinds[-1].free(table[before:count])
            table[before:count] = [0] * (count - before)
            sequence.num_dropped = count

    def drop_unseen(self, sequence: Sequence) -> None:
        """Gives back what no later token of a sequence sees; others find it while it is free."""
        self.drop(sequence, self.kinds[-1].num_unseen(sequence.num_computed))

    def take_fresh(self) -> list[tuple[int, ...]]:
        """The blocks of each kind that were allocated since, to be zeroed."""
        return [kind.take_fresh() for kind in self.kinds]

    def give_back_fresh(self, batch: Batch) -> None:
        """Takes back blocks of a step that was not run: nothing has zeroed them."""
        for kind, blocks in zip(self.kinds, (batch.fresh_blocks, batch.fresh_windowed or ()), strict=False):
            kind.give_back_fresh(blocks)
