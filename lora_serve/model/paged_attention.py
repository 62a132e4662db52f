"""Attention over the cache as it lies, by the programs of `triton_attention`, for blocks that torch cannot read itself.

torch's own kernel takes a block table from 2.12 on, and FlashAttention 2 inside it only blocks of 256 tokens. Gathering
every row's K and V first reads and writes them once more than they are read here. Tests without a GPU run it in
Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import QUERY_TILE, AttentionSettings, DecodeRows, TiledRows

_CHUNK, _MIN_DOT = 256, 16  # keys per program of a decode row
_FOLDED = 16  # chunks that are folded at a time
_KEYS, _KEYS_OF_WIDE_HEADS, _WIDE_HEAD = 64, 32, 512  # keys per product; bytes: two stages of K and V must fit
_TILE_NUMBERS = 8192  # of a tile's sums: 64 rows of a product of 128 columns, which a program's registers hold
_ALL = 2**31 - 1  # the window, or chunk, that hides nothing


def can_run(device: torch.device) -> bool:
    """True if Triton is here and compiles for this device, or interprets."""
    is_here = importlib.util.find_spec("triton") is not None
    return is_here and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


class PagedAttention:
    """Launches the programs; they read what lies on the device alone, so captured graphs may hold them."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        # imported here: a machine without Triton has this file too
        self._programs: Any = importlib.import_module("lora_serve.model.triton_attention")

    def decode(self, layer: int, query: Tensor, rows: DecodeRows, settings: AttentionSettings) -> Tensor:
        """Rows with one query token each: query [rows, num_heads, head_dim] -> the same shape; see `Attention`."""
        query = query.contiguous()
        num_rows, num_heads, head_dim = query.shape
        width = rows.block_table.shape[1]
        chunks = -(-width * self._cache.block_size // _CHUNK)
        partial = torch.empty(num_rows, num_heads, chunks, head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(num_rows, num_heads, chunks, 2, dtype=torch.float32, device=query.device)
        out = torch.empty_like(query)
        numbers, sizes = self._arguments(layer, query, width, settings)
        sinks = sums if settings.sinks is None else settings.sinks  # what is not read has to be a tensor too
        self._programs.decode_chunks[num_rows, sizes["KV_HEADS"], chunks](
            query, *self._cache.layer(layer), rows.block_table, rows.lengths, partial, sums, *numbers, **sizes,
            CHUNK=_CHUNK, BLOCK_G=covering(sizes["G"]), num_stages=2,
        )  # fmt: skip
        self._programs.fold_chunks[num_rows, num_heads](
            partial, sums, rows.lengths, out, sinks, num_heads, chunks, *numbers[-2:],
            D=head_dim, CHUNK=_CHUNK, BLOCK_C=_FOLDED, BLOCK_D=sizes["BLOCK_D"], HAS_SINKS=settings.sinks is not None,
        )  # fmt: skip
        return out

    def attend_tiles(
        self, layer: int, query: Tensor, rows: TiledRows, out: Tensor, settings: AttentionSettings
    ) -> None:
        """Rows of several tokens: writes out [num_tokens, num_heads, head_dim] where a tile has tokens. `query`: all
        tokens of the step.
        """
        numbers, sizes = self._arguments(layer, query, rows.block_table.shape[1], settings)
        heads = max(1, min(sizes["G"], _TILE_NUMBERS // sizes["BLOCK_D"] // QUERY_TILE))
        grid = (len(rows.tiles), sizes["KV_HEADS"], -(-sizes["G"] // heads))
        self._programs.attend_tiles[grid](
            query.contiguous(), *self._cache.layer(layer), rows.tiles, rows.block_table, out,
            query if settings.sinks is None else settings.sinks, *numbers, **sizes,
            HEADS=heads, BLOCK_M=covering(QUERY_TILE * heads), HAS_SINKS=settings.sinks is not None, num_stages=2,
        )  # fmt: skip

    def _arguments(
        self, layer: int, query: Tensor, width: int, settings: AttentionSettings
    ) -> tuple[tuple[float | int, ...], dict[str, Any]]:
        """What all programs take: scale, softcap, width of the block table, window and chunk; and sizes, by name."""
        num_heads, head_dim = query.shape[1:]
        num_kv_heads, wide = self._cache.shape.layers[layer].num_heads, covering(head_dim)
        softcap = settings.softcap
        sees = (_ALL if size is None else size for size in (settings.window, settings.chunk))
        numbers = settings.scale, 1.0 if softcap is None else softcap, width, *sees
        sizes = {
            "G": num_heads // num_kv_heads, "D": head_dim, "KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": self._cache.block_size, "BLOCK_D": wide,
            "BLOCK_N": _KEYS if wide * query.element_size() <= _WIDE_HEAD else _KEYS_OF_WIDE_HEADS,
            "HAS_SOFTCAP": softcap is not None, "HALF": self._programs.product_type(query, self._cache.shape.dtype),
            "STORED": self._cache.shape.form.number, "WIDTH": self._cache.shape.form.width(head_dim),
        }  # fmt: skip
        return numbers, sizes


def covering(number: int) -> int:
    """The power of two that covers it and is large enough for a product."""
    return max(_MIN_DOT, 1 << (number - 1).bit_length())
