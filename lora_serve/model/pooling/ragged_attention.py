"""Attention of packed rows, each within itself: causal for decoders, in both directions for encoders. No cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lora_serve.model.attention.sdpa import attend_masked
from lora_serve.model.pooling.step import PoolingStep, RowGroup
from lora_serve.model.step.step_context import StepContext


class RaggedAttention:
    """A function for transformers' `AttentionInterface`. Rows of like lengths attend in one call."""

    def __init__(self, context: StepContext[PoolingStep]) -> None:
        self._context = context
        self.num_calls = 0  # a model that never calls this cannot be packed

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """query [1, num_heads, T, D], key, value [1, num_kv_heads, T, D], all after RoPE -> [1, T, num_heads, D].

        With a window w a token sees those less than w away. With `softcap` c scores become c * tanh(score / c).
        """
        self.num_calls += 1
        step = self._context.step
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        for number, group in enumerate(step.groups):
            window = None if sliding_window is None or sliding_window >= group.length else sliding_window
            where = (number, causal, window)
            if where not in step.masks:
                step.masks[where] = _mask(group, causal, window, q.dtype, q.device)
            _attend(out, (q, k, v), group, step.masks[where], causal and window is None, scale, softcap)
        return out[None], None


def _attend(
    out: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    group: RowGroup,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> None:
    q, k, v = (tensor[group.index].transpose(1, 2) for tensor in qkv)
    if k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    if softcap is None:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    else:
        found = attend_masked(q, k, v, _open_mask(group.length, is_causal, q) if mask is None else mask, scale, softcap)
    found = found.transpose(1, 2)  # [rows, length, heads, D]
    if group.is_even:
        out[group.index] = found
        return
    for index, own, row in zip(group.index, group.lengths, found, strict=True):
        out[index[:own]] = row[:own]


def _mask(group: RowGroup, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive, broadcasting to [num_rows, 1, length, length]; None: all tokens, or with `causal` those before.

    Behind a row's end lies its own first token, which a causal row never reaches.
    """
    keys = torch.arange(group.length, device=device)
    distance = keys[:, None] - keys
    visible = None
    if window is not None:
        visible = (distance < window) & ((distance >= 0) if causal else (distance > -window))
        visible = visible[None, None]
    if not causal and not group.is_even:
        own = keys < torch.tensor(group.lengths, device=device)[:, None]  # [num_rows, length]
        visible = own[:, None, None] if visible is None else visible & own[:, None, None]
    if visible is None:
        return None
    # behind a row's end a window may see nothing: such a token sees itself, and its result is not used
    visible = visible | (distance == 0) if window is not None else visible
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def _open_mask(length: int, is_causal: bool, like: Tensor) -> Tensor:
    """The mask that None stands for."""
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu_(1), float("-inf")) if is_causal else mask
