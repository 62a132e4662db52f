"""Decode rows over the paged cache as it lies, for GPUs whose torch cannot read these blocks itself.

torch's own kernel takes a block table from 2.12 on, and FlashAttention 2 inside it only blocks of 256 tokens. Gathering
every row's K and V first reads and writes them once more than they are read here. Tests without a GPU run
it in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import DecodeRows

_CHUNK, _MIN_DOT = 256, 16  # keys per program
_KEYS, _KEYS_OF_WIDE_HEADS, _WIDE_HEAD = 64, 32, 512  # keys per product; bytes: two stages of K and V must fit
_NO_WINDOW = 2**31 - 1


def can_serve(device: torch.device) -> bool:
    """Whether Triton is here and compiles for this device, or interprets."""
    is_here = importlib.util.find_spec("triton") is not None
    return is_here and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


class PagedDecode:
    """Attention of rows with one query token each."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        # imported here: a machine without Triton has this file too
        self._programs: Any = importlib.import_module("lora_serve.model.triton_programs.attention")

    def __call__(
        self, layer: int, query: Tensor, rows: DecodeRows, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """query [rows, num_heads, head_dim] -> the same shape; see `Attention`."""
        query = query.contiguous()
        pool_k, pool_v = self._cache.layer(layer)
        num_rows, num_heads, head_dim = query.shape
        size, num_kv_heads = pool_k.shape[1:3]
        width = rows.block_table.shape[1]
        chunks = -(-width * size // _CHUNK)
        partial = torch.empty(num_rows, num_heads, chunks, head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(num_rows, num_heads, chunks, 2, dtype=torch.float32, device=query.device)
        out = torch.empty_like(query)
        group, wide = num_heads // num_kv_heads, _power_of_two(head_dim)
        keys = _KEYS if wide * query.element_size() <= _WIDE_HEAD else _KEYS_OF_WIDE_HEADS
        self._programs.decode_chunks[num_rows, num_kv_heads, chunks](
            query, pool_k, pool_v, rows.block_table, rows.lengths, partial, sums, scale,
            1.0 if softcap is None else softcap, width, _NO_WINDOW if window is None else window,
            G=group, D=head_dim, KV_HEADS=num_kv_heads, BLOCK_SIZE=size, CHUNK=_CHUNK, BLOCK_G=_power_of_two(group),
            BLOCK_D=wide, BLOCK_N=keys, HAS_SOFTCAP=softcap is not None, HALF=self._programs.half_type(query),
            num_stages=2,
        )  # fmt: skip
        self._programs.fold_chunks[num_rows, num_heads](
            partial, sums, rows.lengths, out, num_heads, chunks, D=head_dim, CHUNK=_CHUNK, BLOCK_D=wide
        )
        return out


def _power_of_two(number: int) -> int:
    """That covers it and is large enough for a product."""
    return max(_MIN_DOT, 1 << (number - 1).bit_length())
