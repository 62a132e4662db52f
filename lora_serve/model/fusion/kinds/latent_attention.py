"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434), its keys and values cached for each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lora_serve.model.attention import Attention
from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.kinds.attention import tables
from lora_serve.model.fusion.parts import FusionParts, join_packed, names_only
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.native.layer_kernels import MOST_ROTATED, LayerKernels
from lora_serve.model.step_context import AttentionSettings, ChangeTable, StepContext, StepInputs

STAGE = 1
_LATENT, _KEYS, _OUTPUT = "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_FACTS = ("layer_idx", "num_heads", "q_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim")
_NAMES = frozenset(
    {_LATENT, _KEYS, _OUTPUT, *_NORMS, "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb"}
    | {"apply_rotary_pos_emb_interleave", "attention_dropout", "cat", "config", "contiguous", "copy_"}
    | {"eager_attention_forward", "expand", "expand_kv", "get_interface", "kv_lora_rank", "layer_idx", "new_empty"}
    | {"q_a_proj", "q_b_proj", "q_lora_rank", "q_proj", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"}
    | {"reshape", "rope_interleave", "scaling", "shape", "split", "torch", "training", "transpose", "update"}
    | {"v_head_dim", "view"}
)


@dataclass(frozen=True, slots=True)
class FusedLatentAttention:
    """The layer's own linear layers and norms, with two kernels between them.

    A step with a row whose adapter changes a norm runs the layer's own code.
    """

    own_forward: Callable[..., Any]
    layer: int
    joined: LinearGroup  # of queries, or of what they come of, and of what keys and values come of
    query: LoraLinear | None  # what makes the queries; None: they are joined
    query_norm: nn.Module | None  # before it
    latent_norm: nn.Module
    keys: LoraLinear  # and values
    output: LoraLinear
    rotated: int  # numbers of a head's end
    value: int  # numbers of a value
    changes: Sequence[ChangeTable]  # of both norms
    settings: AttentionSettings
    cache: KVCache
    attention: Attention
    context: StepContext[StepInputs]
    kernels: LayerKernels
    by_pairs: bool = True  # neighbours are rotated together, not halves

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *arguments: Any, **keywords: Any
    ) -> Any:
        """hidden_states [1, tokens, size] -> the same shape, and None."""
        step = self.context.step.of_kind(self.cache.shape.kind_of(self.layer))
        if step.changes_any(self.changes):
            return self.own_forward(hidden_states, position_embeddings, *arguments, **keywords)
        heads = self.cache.shape.layers[self.layer].num_heads
        y = self.joined(hidden_states[0])
        q, latent = (y[:, columns] for columns in self.joined.columns)
        if self.query is not None and self.query_norm is not None:
            q = self.query.group(self.query_norm.forward(q).to(self.kernels.dtype))
        rank = self.keys.base.in_features
        kv = self.keys.group(self.latent_norm.forward(latent[:, :rank]).to(self.kernels.dtype))
        q, kv = (one.view(len(y), heads, -1) for one in (q, kv))
        cos, sin = tables(step, *position_embeddings)
        pools = self.cache.layer(self.layer)
        self.kernels.latent_store(
            q, kv, latent[:, rank:], cos, sin, step.cache_positions, pools, self.cache.shape.form,
            by_pairs=self.by_pairs,
        )  # fmt: skip
        out = self.attention(self.layer, q, q, q, step, self.settings)
        found: Tensor = self.output(out[..., : self.value].reshape(1, len(y), -1))
        return found, None


def could_be(module: nn.Module) -> bool:
    """True for modules with the projections of such attention that name nothing that it has no use for."""
    needed = (_LATENT, _KEYS, _OUTPUT)
    is_like = all(isinstance(getattr(module, name, None), LoraLinear) for name in needed)
    return is_like and all(hasattr(module, name) for name in _FACTS) and names_only(module, _NAMES)


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedLatentAttention]:
    """Those by pairs and by halves, if attention runs in C and both first products lie in one piece of memory."""
    own: Any = module
    settings, cache = parts.settings.get(own.layer_idx), parts.cache
    heads, size = cache.shape.layers[own.layer_idx]
    rotated, value = own.qk_rope_head_dim, own.v_head_dim
    first = own.q_proj if own.q_lora_rank is None else own.q_a_proj
    fits = own.num_heads == heads and own.qk_head_dim == size >= value and rotated <= MOST_ROTATED
    if settings is None or not fits or not isinstance(parts.attention, native_attention.Backend):
        return []
    joined = join_packed((first, own.kv_a_proj_with_mqa))
    if joined is None:
        return []
    query, query_norm = (None, None) if own.q_lora_rank is None else (own.q_b_proj, own.q_a_layernorm)
    changes = [parts.slots.changes_of(f"{parts.paths[module]}.{name}") for name in _NORMS]
    found = FusedLatentAttention(
        module.forward, own.layer_idx, joined, query, query_norm, own.kv_a_layernorm, own.kv_b_proj, own.o_proj,
        rotated, value, changes, settings, cache, parts.attention, parts.context, parts.kernels,
    )  # fmt: skip
    return [found, replace(found, by_pairs=False)]
