"""The table of KV blocks, and automatic prefix caching over it. The bytes are in `model/kv_cache.py`.

A block whose K and V are computed can be found by a key, also while it is free, until it is given to another sequence:
the free list is the cache, and the longest free block is given away first (as in vLLM's `BlockPool`). A full block is
known by everything that its K and V depend on, as a chain of digests:

    key[i] = H(key[i - 1], token ids of block i, adapters that act in block i),    key[-1] = H_secret(tenant)

With `shares_base` the chain begins at H_secret(""), unless the request has a salt, and the tenant joins it where the
first adapter acts. K and V of a token depend on all tokens before it and on the adapters that acted on each of them;
both are in the chain (vLLM's automatic prefix caching, Kwon et al., SOSP 2023, with digests of content in place of
names). An activated LoRA (Greenewald et al., 2025, arXiv 2504.12397) is left out of blocks that end before it starts:
those are the base model's. The chain of a sequence with the long factors of `LongRope` has a root of its own.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from hashlib import blake2b

from lora_serve.core.request import AdapterUse
from lora_serve.engine.sequence import Sequence

_DIGEST_BYTES = 32


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

    def drop(self, sequence: Sequence, count: int) -> None:
        """Gives back a sequence's first `count` blocks, as far as it holds them; 0 stands in their places."""
        before = sequence.num_dropped
        if count > before:
            self.free(sequence.blocks[before:count])
            sequence.blocks[before:count] = [0] * (count - before)
            sequence.num_dropped = count

    def take_fresh(self) -> tuple[int, ...]:
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def give_back_fresh(self, blocks: Iterable[int]) -> None:
        """Takes back blocks of a step that was not run: nothing has zeroed them."""
        self._fresh.extend(blocks)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of keys."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: bytes) -> int:
        """The known block of a key; 0: there is none."""
        return self._by_key.get(key, 0)

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


def acting_in(adapters: tuple[AdapterUse, ...], start: int, end: int) -> list[tuple[str, float, int]]:
    """(digest, scale, first position counted from `start`) of the adapters that act on any of start .. end - 1.

    The position matters where an adapter starts inside the block: of two sequences with equal tokens so far, a later
    token may complete another invocation in one of them and move its start.
    """
    return sorted((use.ref.digest, use.scale, max(0, use.start - start)) for use in adapters if use.start < end)


class PrefixCache:
    """Connects sequences with the table of blocks. Unless `is_enabled`, no block is ever found or published.

    Keys are made under a secret of this process, so that none can be guessed from outside. No two tenants share one,
    but for blocks of the base model alone with `shares_base`: then a tenant can tell from the time to first token, and
    from `cached_tokens`, that another has sent the same beginning lately without a salt.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        is_enabled: bool,
        shares_base: bool = False,
        num_unseen: Callable[[int, int], int] | None = None,
        step_tokens: int = 0,
    ) -> None:
        """`num_unseen`: see `ModelSpec`; None: every token sees all before it. `step_tokens`: of a step, at most."""
        self._blocks = blocks
        self._step_tokens = step_tokens
        self._num_unseen = num_unseen
        self._is_enabled = is_enabled
        self._shares_base = shares_base
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self.num_queries = 0  # tokens of the prompts that were looked up, each once
        self.num_hits = 0  # and those of them that were found

    def can_allocate(self, sequence: Sequence) -> bool:
        """True if the free blocks suffice for all known tokens and one more, or for as many of them as are held at a
        time; blocks that can be shared are not needed anew.
        """
        if sequence.is_pooling:
            return True
        num_tokens = len(sequence.token_ids) + 1
        num_held = num_needed = self._blocks.num_needed(num_tokens)
        if self._num_unseen is not None:
            num_held -= self._num_unseen(max(0, num_tokens - self._step_tokens), self._blocks.block_size)
        if num_held <= self._blocks.num_free:
            return True
        found = self._find(sequence)
        num_taken = num_needed - len(found) + self._blocks.num_free_of(filter(None, found))
        return min(num_held, num_taken) <= self._blocks.num_free

    def num_known(self, sequence: Sequence) -> int:
        """The tokens that the sequence would not have to compute if it began now."""
        return len(self._find(sequence)) * self._blocks.block_size

    def attach(self, sequence: Sequence) -> None:
        """Gives a newly admitted sequence its longest known prefix, as far as later tokens see it; it starts behind
        that.
        """
        if not self._can_look_up(sequence):
            return
        found = self._find(sequence)
        self._blocks.share(filter(None, found))
        sequence.blocks.extend(found)
        sequence.num_dropped = found.count(0)
        sequence.num_computed = sequence.num_published = len(found) * self._blocks.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached = sequence.num_computed
            if not sequence.request.is_warm_up:
                self.num_queries += len(sequence.token_ids)
                self.num_hits += sequence.num_cached

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that a sequence has filled, or that came back from host memory, readable by others. From
        time to time it gives back those that no later token of it sees; others find them while they are free.
        """
        size = self._blocks.block_size
        first, end = sequence.num_published // size, sequence.num_computed // size
        sequence.num_published = sequence.num_computed
        if first == end or sequence.is_pooling:
            return
        if self._is_enabled:
            keys = self.keys_of(sequence)
            for index in range(first, end):
                self._blocks.publish(sequence.blocks[index], keys[index], keys[index - 1] if index else None)
        if self._num_unseen is not None:
            self._blocks.drop(sequence, self._num_unseen(sequence.num_computed, size))

    def invalidate(self, sequence: Sequence) -> None:
        """Makes the blocks of a row that ended with an error unfindable, as any of them may be at fault."""
        self._blocks.forget(sequence.block_keys)

    def clear(self) -> None:
        self._blocks.forget_all()

    def _find(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix; 0 stands for those that no later token sees, known or not.

        Never all of its tokens: logits need one computed token, and a shared block cannot take its K and V.
        """
        if not self._can_look_up(sequence):
            return []
        size = self._blocks.block_size
        keys = self.keys_of(sequence)[: (len(sequence.token_ids) - 1) // size]
        if self._num_unseen is None:
            return self._blocks.find(keys)
        blocks = [self._blocks.block_of(key) for key in keys]
        end = num_known = 0
        for index, block in enumerate(blocks, start=1):
            num_known = num_known + 1 if block else 0
            if num_known and num_known >= index - self._num_unseen(index * size, size):
                end = index
        num_unseen = self._num_unseen(end * size, size)
        return [0] * num_unseen + blocks[num_unseen:end]

    def _can_look_up(self, sequence: Sequence) -> bool:
        return self._is_enabled and not sequence.is_pooling and not sequence.wants_prompt_logprobs

    def keys_of(self, sequence: Sequence) -> list[bytes]:
        """The keys of all full blocks of known tokens, each worked out once.

        Those of a salted request are shared with none beyond its scope, which holds the salt.
        """
        keys, size = sequence.block_keys, self._blocks.block_size
        scope, is_long = sequence.request.scope, sequence.is_long
        shares_base = self._shares_base and not sequence.request.is_salted
        for index in range(len(keys), len(sequence.token_ids) // size):
            start = index * size
            acting = acting_in(sequence.adapters, start, start + size)
            parent = keys[-1] if keys else self._root("" if shares_base else scope, is_long)
            tokens = array("q", sequence.token_ids[start : start + size]).tobytes()
            identity = repr((acting, scope) if acting and shares_base else acting).encode()
            keys.append(blake2b(parent + tokens + identity, digest_size=_DIGEST_BYTES).digest())
        return keys

    def _root(self, scope: str, is_long: bool) -> bytes:
        return blake2b(scope.encode(), key=self._secret, digest_size=_DIGEST_BYTES, salt=b"long" * is_long).digest()
