"""Which computed blocks a sequence need not compute again, and which of its own others may read."""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from lora_serve.core.request import AdapterUse
from lora_serve.engine.kv.blocks import BlockManager
from lora_serve.engine.sequence import Sequence

_DIGEST_BYTES = 32


class BlockKeys:
    """Makes keys. The secret is this process's own: nobody outside can name a key.

    No two tenants share one, but for blocks of the base model alone with `shares_base`: then a tenant can tell by the
    time to first token, and by `cached_tokens`, that somebody has sent the same beginning lately.
    """

    def __init__(self, block_size: int, *, shares_base: bool = False) -> None:
        self._shares_base = shares_base
        self._block_size = block_size
        self._secret = secrets.token_bytes(_DIGEST_BYTES)

    def extend(self, keys: list[bytes], tenant: str, adapters: tuple[AdapterUse, ...], token_ids: list[int]) -> None:
        """Append to a sequence's `keys` those of the full blocks of `token_ids` that are missing in it."""
        size = self._block_size
        for index in range(len(keys), len(token_ids) // size):
            start = index * size
            acting = acting_in(adapters, start, start + size)
            parent = keys[-1] if keys else self._root("" if self._shares_base else tenant)
            tokens = array("q", token_ids[start : start + size]).tobytes()
            identity = repr((acting, tenant) if acting and self._shares_base else acting).encode()
            keys.append(blake2b(parent + tokens + identity, digest_size=_DIGEST_BYTES).digest())

    def _root(self, tenant: str) -> bytes:
        return blake2b(tenant.encode(), key=self._secret, digest_size=_DIGEST_BYTES).digest()


def acting_in(adapters: tuple[AdapterUse, ...], start: int, end: int) -> list[tuple[str, float, int]]:
    """(digest, scale, first position counted from `start`) of the adapters that act on any of start .. end - 1.

    The position is needed where an adapter starts inside: of two sequences with equal tokens so far, a later token
    may complete another invocation in one of them and move its start.
    """
    return sorted((use.ref.digest, use.scale, max(0, use.start - start)) for use in adapters if use.start < end)


class PrefixCache:
    """Sequences meet the table of blocks here. Without `is_enabled` nothing is ever found or published."""

    def __init__(self, blocks: BlockManager, *, is_enabled: bool, shares_base: bool = False) -> None:
        self._blocks = blocks
        self._keys = BlockKeys(blocks.block_size, shares_base=shares_base)
        self._is_enabled = is_enabled
        self.num_queries = 0  # tokens of the prompts that were looked up, each once
        self.num_hits = 0  # and those of them that were found

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the free blocks suffice for all known tokens and one more; what can be shared is not needed anew."""
        if sequence.is_pooling:
            return True
        num_needed = self._blocks.num_needed(len(sequence.token_ids) + 1)
        if num_needed <= self._blocks.num_free:
            return True
        found = self._find(sequence)
        return num_needed - len(found) + self._blocks.num_free_of(found) <= self._blocks.num_free

    def num_known(self, sequence: Sequence) -> int:
        """Tokens that it would not have to compute if it began now."""
        return len(self._find(sequence)) * self._blocks.block_size

    def attach(self, sequence: Sequence) -> None:
        """At admission: the longest known head of the sequence becomes its own, and it starts behind that."""
        if not self._can_look_up(sequence):
            return
        found = self._find(sequence)
        self._blocks.share(found)
        sequence.blocks.extend(found)
        sequence.num_computed = sequence.num_published = len(found) * self._blocks.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached = sequence.num_computed
            self.num_queries += len(sequence.token_ids)
            self.num_hits += sequence.num_cached

    def publish(self, sequence: Sequence) -> None:
        """After a step: the blocks that it filled, or that came back from host memory, can be read by others."""
        size = self._blocks.block_size
        first, end = sequence.num_published // size, sequence.num_computed // size
        sequence.num_published = sequence.num_computed
        if not self._is_enabled or first == end or sequence.is_pooling:
            return
        keys = self._keys_of(sequence)
        for index in range(first, end):
            self._blocks.publish(sequence.blocks[index], keys[index], keys[index - 1] if index else None)

    def invalidate(self, sequence: Sequence) -> None:
        """Its row ended with an error: nobody shall find a block that it read or wrote, as any may be at fault."""
        self._blocks.forget(sequence.blocks)

    def clear(self) -> None:
        """Forget everything."""
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
        """Of all full blocks of its known tokens; worked out once each."""
        request = sequence.request
        scope = request.cache_scope or request.tenant
        self._keys.extend(sequence.block_keys, scope, sequence.adapters, sequence.token_ids)
        return sequence.block_keys
