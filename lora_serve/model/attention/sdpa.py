"""Paged attention with torch's scaled_dot_product_attention: runs everywhere, fastest on CPU.

Decode rows go in one call: their blocks are gathered by `index_select` (four times faster than `pool[table]`) and
the query heads of a KV group are folded into the query length, which avoids the slow grouped-query path for one
query token. Prefill rows go one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.model.kv_cache import KVCache
from lora_serve.model.kv_format import PLAIN
from lora_serve.model.step_context import AttentionSettings, StepInputs

PREFERENCE = 1


def why_not(cache: KVCache) -> str | None:
    """The reason why it cannot serve `cache`: none, it runs everywhere."""
    return None


class Backend:
    reads_tiles = False

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        out = torch.empty_like(query)
        rows = step.decode.num_rows
        if rows:
            out[:rows] = self.decode(layer, query[:rows], step, settings)
        for row in step.prefill:
            here = slice(row.start, row.end)
            if row.context == 0 and self.cache.shape.form is PLAIN:
                keys, values = key[here], value[here]
            else:
                length = row.context + row.end - row.start
                keys, values = (one[:length] for one in self.cache.gather(layer, row.blocks))
            out[here] = _prefill(query[here], keys, values, row.context, settings)
        return out

    def decode(self, layer: int, query: Tensor, step: StepInputs, settings: AttentionSettings) -> Tensor:
        """query [rows, num_heads, head_dim] -> the same shape."""
        rows, num_heads, head_dim = query.shape
        num_kv_heads = self.cache.shape.layers[layer].num_heads
        gathered = self.cache.gather(layer, step.decode.block_table.reshape(-1))
        keys, values = (one.view(rows, -1, num_kv_heads, head_dim).transpose(1, 2) for one in gathered)
        sees = settings.window, settings.chunk
        mask: Tensor | None = step.prepared.get(sees)
        if mask is None:
            mask = step.prepared[sees] = _decode_mask(step.decode.lengths, keys.shape[2], settings, query.dtype)
        folded = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        sinks = None if settings.sinks is None else settings.sinks.view(num_kv_heads, -1, 1)
        found = attend_masked(folded, keys, values, mask, settings.scale, settings.softcap, sinks)
        return found.reshape(rows, num_heads, head_dim)


def _decode_mask(lengths: Tensor, num_keys: int, settings: AttentionSettings, dtype: torch.dtype) -> Tensor:
    """An additive mask [rows, 1, 1, num_keys]: 0 where the row's last token may look, -inf elsewhere."""
    keys = torch.arange(num_keys, device=lengths.device)
    visible = keys < lengths[:, None]
    if settings.hides(num_keys):
        visible &= keys >= settings.first_seen(lengths - 1)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None, None, :]


def _prefill(query: Tensor, keys: Tensor, values: Tensor, context: int, settings: AttentionSettings) -> Tensor:
    """query [tokens, num_heads, head_dim] over keys, values [context + tokens, num_kv_heads, head_dim]."""
    tokens, num_heads, _ = query.shape
    scale, softcap, sinks = settings.scale, settings.softcap, settings.sinks
    hides = settings.hides(context + tokens)
    group = num_heads // keys.shape[1]
    q = query.transpose(0, 1)[None]  # [1, num_heads, tokens, head_dim]
    k = keys.transpose(0, 1).repeat_interleave(group, dim=0)[None]
    v = values.transpose(0, 1).repeat_interleave(group, dim=0)[None]
    if softcap is None and sinks is None and context == 0 and not hides:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    q_positions = torch.arange(context, context + tokens, device=query.device)[:, None]
    k_positions = torch.arange(keys.shape[0], device=query.device)[None, :]
    visible = k_positions <= q_positions
    if hides:
        visible &= k_positions >= settings.first_seen(q_positions)
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~visible, float("-inf"))
    sinks = None if sinks is None else sinks.view(-1, 1, 1)
    return attend_masked(q, k, v, mask, scale, softcap, sinks)[0].transpose(0, 1)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention with an additive mask; soft-capped scores (Gemma 2, arXiv 2408.00118), and those beside `sinks` [heads,
    queries or 1, 1], are computed explicitly.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2)
    scores = (scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))) + mask
    if sinks is not None:
        scores = torch.cat([scores.float(), sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : k.shape[-2]].to(q.dtype) @ v
