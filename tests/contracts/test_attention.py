"""Every attention backend against the definition, computed row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch

from lora_serve.model.attention import create_attention
from lora_serve.model.kv_cache import KVCache
from tests.model.tiny import filled_cache, step_of

# (context, tokens, blocks of 4 tokens), decode rows first
ROWS = [(6, 1, [3, 1]), (0, 1, [2]), (13, 1, [4, 5, 6, 7]), (0, 5, [8, 9]), (6, 7, [10, 11, 12, 13]), (3, 2, [14, 15])]


def expected(
    cache: KVCache, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """softmax over the visible keys, one query token and one head at a time."""
    keys, values = (pool.double().flatten(0, 1) for pool in cache.layer(0))
    out, token = torch.zeros_like(query, dtype=torch.float64), 0
    group = query.shape[1] // keys.shape[1]
    for context, tokens, blocks in ROWS:
        places = [block * cache.block_size + offset for block in blocks for offset in range(cache.block_size)]
        for position in range(context, context + tokens):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.tensor(places[first : position + 1])
            for head in range(query.shape[1]):
                scores = keys[seen, head // group] @ query[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[token, head] = torch.softmax(scores, 0) @ values[seen, head // group]
            token += 1
    return out


@pytest.mark.parametrize("name", ["native", "sdpa"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_the_definition(
    name: str, num_heads: int, num_kv_heads: int, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(0)
    cache = filled_cache(16, 4, num_kv_heads, 8)
    attention = create_attention(name, cache)
    step = step_of(ROWS)
    query = torch.randn(sum(tokens for _, tokens, _ in ROWS), num_heads, 8)
    keys, values = (pool.flatten(0, 1) for pool in cache.layer(0))
    places = torch.tensor(
        [blocks[p // 4] * 4 + p % 4 for context, tokens, blocks in ROWS for p in range(context, context + tokens)]
    )
    scale = 1 / math.sqrt(8)
    found = attention(0, query, keys[places], values[places], step, scale=scale, window=window, softcap=softcap)
    assert torch.allclose(found.double(), expected(cache, query, scale, window, softcap), atol=1e-5)
