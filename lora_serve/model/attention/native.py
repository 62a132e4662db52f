"""`native.c` for decode rows: reads the paged cache in place. Prefill rows go the way of `sdpa`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.errors import ConfigError
from lora_serve.model import c_compiler
from lora_serve.model.attention import sdpa
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import StepInputs

_SOURCE = Path(__file__).with_name("native.c")
_MAX_GROUP = 64  # query heads per KV head, of native.c
_ADDRESS, _SIZE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: list[Any] = [_ADDRESS, _ADDRESS, *[_SIZE] * 4, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _SIZE]


def why_not(cache: KVCache) -> str | None:
    """Why this backend cannot serve `cache`; None: it can."""
    if cache.shape.dtype != torch.float32:
        return f"reads float32 caches only, this one is {cache.shape.dtype}"
    return c_compiler.why_not(_SOURCE, cache.device)


class Backend(sdpa.Backend):
    """See `Attention`."""

    def __init__(self, cache: KVCache) -> None:
        reason = why_not(cache)
        if reason is not None:
            raise ConfigError(f"--attention native: {reason}")
        super().__init__(cache)
        self._attend = c_compiler.load_library(_SOURCE).attend_decode
        self._attend.argtypes, self._attend.restype = [*_ARGUMENTS, _REAL, _REAL], None

    def decode(
        self, layer: int, query: Tensor, step: StepInputs, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        rows, num_heads, head_dim = query.shape
        keys, values = self.cache.layer(layer)
        num_kv_heads, group = self.cache.shape.num_kv_heads, num_heads // self.cache.shape.num_kv_heads
        if group > _MAX_GROUP:
            return super().decode(layer, query, step, scale, window, softcap)
        query = query.contiguous()
        out = torch.empty_like(query)
        table, lengths = step.decode.block_table, step.decode.lengths
        self._attend(
            query.data_ptr(), out.data_ptr(), rows, num_kv_heads, group, head_dim, keys.data_ptr(), values.data_ptr(),
            self.cache.block_size, table.data_ptr(), table.shape[1], lengths.data_ptr(), window or 0, scale,
            softcap or 0.0,
        )  # fmt: skip
        return out
