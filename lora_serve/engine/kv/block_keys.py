"""What a full KV block is known by: everything its K and V are a function of, as a chain of digests.

    key[i] = H(key[i - 1], token ids of block i, adapters that act in block i),    key[-1] = H_secret(tenant)

With `shares_base` the chain begins at H_secret(nobody), and the tenant joins it where the first adapter acts.

K and V of a token depend on all tokens before it, and on the adapters that acted on each of them; both are in the
chain (vLLM's automatic prefix caching, Kwon et al., SOSP 2023, with identities of content in place of names). An
activated LoRA (Greenewald et al., 2025, arXiv 2504.12397) is left out of blocks that end before it starts: those are
the base model's.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from lora_serve.core.request import AdapterUse

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

    def extend(self, keys: list[bytes], tenant: str, adapters: Sequence[AdapterUse], token_ids: Sequence[int]) -> None:
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


def acting_in(adapters: Sequence[AdapterUse], start: int, end: int) -> list[tuple[str, float, int]]:
    """(digest, scale, first position counted from `start`) of the adapters that act on any of start .. end - 1.

    The position is needed where an adapter starts inside: of two sequences with equal tokens so far, a later token
    may complete another invocation in one of them and move its start.
    """
    return sorted((use.ref.digest, use.scale, max(0, use.start - start)) for use in adapters if use.start < end)
