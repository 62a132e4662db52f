"""Automatic prefix caching: blocks that a sequence need not compute, and those of its own that others may read.

A full block is known by everything that its K and V depend on, as a chain of digests:

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
from lora_serve.engine.kv.blocks import BlockManager
from lora_serve.engine.sequence import Sequence

_DIGEST_BYTES = 32


class BlockKeys:
    """Makes the keys of blocks, under a secret of this process: a key cannot be guessed from outside.

    No two tenants share a key, but for blocks of the base model alone with `shares_base`: then a tenant can tell from
    the time to first token, and from `cached_tokens`, that another has sent the same beginning lately without a salt.
    """

    def __init__(self, block_size: int, *, shares_base: bool = False) -> None:
        self._shares_base = shares_base
        self._block_size = block_size
        self._secret = secrets.token_bytes(_DIGEST_BYTES)

    def extend(
        self,
        keys: list[bytes],
        tenant: str,
        adapters: tuple[AdapterUse, ...],
        token_ids: list[int],
        *,
        is_salted: bool = False,
        is_long: bool = False,
    ) -> None:
        """Appends to a sequence's `keys` those of the full blocks of `token_ids` that it lacks. `is_salted`: nothing is
        shared beyond `tenant`, which holds the salt. `is_long`: its K are rotated by the long factors.
        """
        size, shares_base = self._block_size, self._shares_base and not is_salted
        for index in range(len(keys), len(token_ids) // size):
            start = index * size
            acting = acting_in(adapters, start, start + size)
            parent = keys[-1] if keys else self._root("" if shares_base else tenant, is_long)
            tokens = array("q", token_ids[start : start + size]).tobytes()
            identity = repr((acting, tenant) if acting and shares_base else acting).encode()
            keys.append(blake2b(parent + tokens + identity, digest_size=_DIGEST_BYTES).digest())

    def _root(self, tenant: str, is_long: bool) -> bytes:
        return blake2b(tenant.encode(), key=self._secret, digest_size=_DIGEST_BYTES, salt=b"long" * is_long).digest()


def acting_in(adapters: tuple[AdapterUse, ...], start: int, end: int) -> list[tuple[str, float, int]]:
    """(digest, scale, first position counted from `start`) of the adapters that act on any of start .. end - 1.

    The position matters where an adapter starts inside the block: of two sequences with equal tokens so far, a later
    token may complete another invocation in one of them and move its start.
    """
    return sorted((use.ref.digest, use.scale, max(0, use.start - start)) for use in adapters if use.start < end)


class PrefixCache:
    """Connects sequences with the table of blocks. Unless `is_enabled`, no block is ever found or published."""

    def __init__(self, blocks: BlockManager, *, is_enabled: bool, shares_base: bool = False) -> None:
        self._blocks = blocks
        self._keys = BlockKeys(blocks.block_size, shares_base=shares_base)
        self._is_enabled = is_enabled
        self.num_queries = 0  # tokens of the prompts that were looked up, each once
        self.num_hits = 0  # and those of them that were found

    def has_room(self, sequence: Sequence) -> bool:
        """True if the free blocks suffice for all known tokens and one more; blocks that can be shared are not needed
        anew.
        """
        if sequence.is_pooling:
            return True
        num_needed = self._blocks.num_needed(len(sequence.token_ids) + 1)
        if num_needed <= self._blocks.num_free:
            return True
        found = self._find(sequence)
        return num_needed - len(found) + self._blocks.num_free_of(found) <= self._blocks.num_free

    def num_known(self, sequence: Sequence) -> int:
        """The tokens that the sequence would not have to compute if it began now."""
        return len(self._find(sequence)) * self._blocks.block_size

    def attach(self, sequence: Sequence) -> None:
        """Gives a newly admitted sequence its longest known prefix; it starts behind that."""
        if not self._can_look_up(sequence):
            return
        found = self._find(sequence)
        self._blocks.share(found)
        sequence.blocks.extend(found)
        sequence.num_computed = sequence.num_published = len(found) * self._blocks.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached = sequence.num_computed
            if not sequence.request.is_warm_up:
                self.num_queries += len(sequence.token_ids)
                self.num_hits += sequence.num_cached

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that a sequence has filled, or that came back from host memory, readable by others."""
        size = self._blocks.block_size
        first, end = sequence.num_published // size, sequence.num_computed // size
        sequence.num_published = sequence.num_computed
        if not self._is_enabled or first == end or sequence.is_pooling:
            return
        keys = self._keys_of(sequence)
        for index in range(first, end):
            self._blocks.publish(sequence.blocks[index], keys[index], keys[index - 1] if index else None)

    def invalidate(self, sequence: Sequence) -> None:
        """Makes the blocks of a row that ended with an error unfindable, as any of them may be at fault."""
        self._blocks.forget(sequence.blocks)

    def clear(self) -> None:
        self._blocks.forget_all()

    def _find(self, sequence: Sequence) -> list[int]:
        """Never all of its tokens: logits need one computed token, and a shared block cannot take its K and V."""
        if not self._can_look_up(sequence):
            return []
        most = (len(sequence.token_ids) - 1) // self._blocks.block_size
        return self._blocks.find(self._keys_of(sequence)[:most])

    def _can_look_up(self, sequence: Sequence) -> bool:
        return self._is_enabled and not sequence.is_pooling and not sequence.wants_prompt_logprobs

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """The keys of all full blocks of known tokens, each worked out once."""
        request = sequence.request
        self._keys.extend(
            sequence.block_keys, request.scope, sequence.adapters, sequence.token_ids, is_salted=request.is_salted,
            is_long=sequence.is_long,
        )  # fmt: skip
        return sequence.block_keys
