"""Automatic prefix caching over the tables of KV blocks.

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
from hashlib import blake2b

from lora_serve.core.request import AdapterUse
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.sequence import Sequence

_DIGEST_BYTES = 32


def acting_in(adapters: tuple[AdapterUse, ...], start: int, end: int) -> list[tuple[str, float, int]]:
    """(digest, scale, first position counted from `start`) of the adapters that act on any of start .. end - 1.

    The position matters where an adapter starts inside the block: of two sequences with equal tokens so far, a later
    token may complete another invocation in one of them and move its start.
    """
    return sorted((use.ref.digest, use.scale, max(0, use.start - start)) for use in adapters if use.start < end)


class PrefixCache:
    """Connects sequences with the tables of blocks. Unless `is_enabled`, no block is ever found or published.

    Keys are made under a secret of this process, so that none can be guessed from outside. No two tenants share one,
    but for blocks of the base model alone with `shares_base`: then a tenant can tell from the time to first token, and
    from `cached_tokens`, that another has sent the same beginning lately without a salt.
    """

    def __init__(
        self,
        blocks: BlockTables,
        *,
        is_enabled: bool,
        shares_base: bool = False,
        step_tokens: int = 0,
    ) -> None:
        """`step_tokens`: of a step, at most."""
        self._blocks = blocks
        self._step_tokens = step_tokens
        self._is_enabled = is_enabled
        self._shares_base = shares_base
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self.num_queries = 0  # tokens of the prompts that were looked up, each once
        self.num_hits = 0  # and those of them that were found

    def can_allocate(self, sequence: Sequence) -> bool:
        """True if the free blocks of each kind suffice for all known tokens and one more, or for as many of them as are
        held at a time; blocks that can be shared are not needed anew.
        """
        if sequence.is_pooling:
            return True
        num_tokens = len(sequence.token_ids) + 1
        num_needed = self._blocks.num_needed(num_tokens)
        before_step = max(0, num_tokens - self._step_tokens)
        short = [kind for kind in self._blocks.kinds if num_needed - kind.num_unseen(before_step) > kind.num_free]
        if not short:
            return True
        found = dict(zip(self._blocks.kinds, self._find(sequence), strict=True))
        return all(
            num_needed - len(found[kind]) + kind.num_free_of(filter(None, found[kind])) <= kind.num_free
            for kind in short
        )

    def num_known(self, sequence: Sequence) -> int:
        """The tokens that the sequence would not have to compute if it began now."""
        return len(self._find(sequence)[0]) * self._blocks.block_size

    def attach(self, sequence: Sequence) -> None:
        """Gives a newly admitted sequence its longest known prefix, as far as later tokens see it; it starts behind
        that.
        """
        if not self._can_look_up(sequence):
            return
        found = self._find(sequence)
        for (kind, table), blocks in zip(self._blocks.of(sequence), found, strict=True):
            kind.share(filter(None, blocks))
            table.extend(blocks)
        sequence.num_dropped = found[-1].count(0)
        sequence.num_computed = sequence.num_published = len(found[0]) * self._blocks.block_size
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
            for kind, table in self._blocks.of(sequence):
                for index in range(first if kind.window is None else max(first, sequence.num_dropped), end):
                    kind.publish(table[index], keys[index], keys[index - 1] if index else None)
        self._blocks.drop_unseen(sequence)

    def invalidate(self, sequence: Sequence) -> None:
        """Makes the blocks of a row that ended with an error unfindable, as any of them may be at fault."""
        for kind in self._blocks.kinds:
            kind.forget(sequence.block_keys)

    def clear(self) -> None:
        for kind in self._blocks.kinds:
            kind.forget_all()

    def _find(self, sequence: Sequence) -> list[list[int]]:
        """The blocks of the longest prefix that all kinds know, by kind: see `BlockManager.find`.

        Never all of its tokens: logits need one computed token, and a shared block cannot take its K and V.
        """
        can_look_up = self._can_look_up(sequence)
        keys = self.keys_of(sequence)[: (len(sequence.token_ids) - 1) // self._blocks.block_size] if can_look_up else []
        found = []
        for kind in self._blocks.kinds:
            found.append(kind.find(keys))
            keys = keys[: len(found[-1])]
        return [blocks[: len(keys)] for blocks in found]

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
