"""Attention on CUDA against sdpa: torch's varlen_attn as far as it goes here, Triton for the rest."""

from __future__ import annotations

import pytest
import torch

from lora_serve.model.attention import create_attention, varlen
from lora_serve.model.step_context import AttentionSettings
from tests.model.tiny import filled_cache, step_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTHS = [(700, 1), (0, 1), (255, 1), (5002, 1), (0, 300), (130, 77)]


def laid_out(block_size: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Rows with blocks of their own, and how many blocks there are."""
    rows, first = [], 1
    for context, tokens in LENGTHS:
        count = -(-(context + tokens) // block_size)
        rows.append((context, tokens, list(range(first, first + count))))
        first += count
    return rows, first


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (4, 4, 64), (6, 2, 80)])
@pytest.mark.parametrize(
    ("window", "softcap", "chunk"), [(None, None, None), (100, None, None), (None, 20.0, None), (None, None, 96)]
)
def test_auto_is_varlen_and_agrees_with_sdpa(
    block_size: int, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int,
    window: int | None, softcap: float | None, chunk: int | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    rows, num_blocks = laid_out(block_size)
    cache = filled_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, CUDA)
    keys, values = (pool.flatten(0, 1) for pool in cache.layer(0))
    places = torch.tensor(
        [blocks[p // block_size] * block_size + p % block_size for c, n, blocks in rows for p in range(c, c + n)],
        device=CUDA,
    )
    query = torch.randn(len(places), num_heads, head_dim, device=CUDA).to(dtype)
    backend = create_attention("auto", cache)
    assert isinstance(backend, varlen.Backend)
    settings = AttentionSettings(0.1, window, softcap, chunk=chunk)
    found, wanted = (
        one(0, query, keys[places], values[places], step_of(rows, CUDA), settings)
        for one in (backend, create_attention("sdpa", cache))
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    assert torch.allclose(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)
