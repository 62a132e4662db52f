"""Paged attention in C (`native/paged_attention.c`): reads the cache where it lies, for chunks and single tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.native import library
from lora_serve.model.step_context import AttentionSettings, StepInputs

PREFERENCE = 2
_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: list[Any] = [
    _ADDRESS, _SIZE, *[_ADDRESS] * 3, *[_SIZE] * 4, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _FLOAT, _SIZE, _SIZE, _FLOAT,
    _ADDRESS, _SIZE,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionPieces:
    """The step's rows in the form that the kernel reads, cut into a few tokens each."""

    table: Tensor  # [num_pieces, 4] int32: first packed token, tokens, cached before them, offset into `blocks`
    blocks: Tensor  # int32, the rows' block tables end to end
    most_tokens: int


def why_not(cache: KVCache) -> str | None:
    """The reason why C kernels cannot serve `cache`; None: they can."""
    return library.why_not(cache.device, cache.shape.dtype)


class Backend:
    reads_tiles = False

    def __init__(self, cache: KVCache) -> None:
        kernels = library.load(cache.shape.dtype)
        kernels.paged_attention.argtypes, kernels.paged_attention.restype = _ARGUMENTS, None
        self._attend = kernels.paged_attention
        self._queries_together: int = kernels.queries_together()
        self.cache = cache

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        """query of the cache's type, or float32, which the kernel rounds to it; the result is of the cache's type."""
        num_heads, num_kv_heads = query.shape[1], self.cache.shape.layers[layer].num_heads
        pieces = self.pieces(step, num_heads // num_kv_heads)
        query = query.float()
        query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
        out = query.new_empty(query.shape, dtype=self.cache.shape.dtype)
        pool_k, pool_v = self.cache.layer(layer)
        self._attend(
            query.data_ptr(), query.stride(0), pool_k.data_ptr(), pool_v.data_ptr(), out.data_ptr(),
            num_heads, num_kv_heads, query.shape[2], self.cache.block_size,
            pieces.blocks.data_ptr(), pieces.table.data_ptr(), len(pieces.table), pieces.most_tokens,
            settings.scale, settings.window or 0, settings.chunk or 0, settings.softcap or 0.0,
            None if settings.sinks is None else settings.sinks.data_ptr(), self.cache.shape.form.number,
        )  # fmt: skip
        return out

    def pieces(self, step: StepInputs, group: int) -> AttentionPieces:
        """The step's rows in the kernel's form, worked out once for all layers. `group`: query heads of a KV head."""
        found: AttentionPieces | None = step.prepared.get(group)
        if found is None:
            tokens = max(1, self._queries_together // group)
            found = step.prepared[group] = _pieces(step, tokens)
        return found


def _pieces(step: StepInputs, tokens: int) -> AttentionPieces:
    """Pieces of at most `tokens` tokens; the last ones of a long prompt, which see most keys, first."""
    width = step.decode.block_table.shape[1] if step.decode.num_rows else 0
    rows = [(i, 1, length - 1, i * width) for i, length in enumerate(step.decode.lengths.tolist())]
    blocks = [step.decode.block_table.reshape(-1)]
    offset = step.decode.num_rows * width
    for row in step.prefill:
        count = row.end - row.start
        rows += [
            (row.start + first, min(tokens, count - first), row.context + first, offset)
            for first in reversed(range(0, count, tokens))
        ]
        blocks.append(row.blocks)
        offset += len(row.blocks)
    table = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    return AttentionPieces(table, torch.cat(blocks).to(torch.int32), min(tokens, max(row[1] for row in rows)))
