"""Attention layers with rotary positions (arXiv 2104.09864) in two halves, as Llama's: q, k and v as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.attention import Attention
from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.parts import FusionParts, join_packed, names_only
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.native.layer_kernels import LayerKernels
from lora_serve.model.step_context import AttentionSettings, ChangeTable, StepContext, StepInputs

STAGE = 1
_PARTS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm", "v_norm")
_OTHERS = ("o_proj", *_NORMS)
_NAMES = frozenset(
    {*_PARTS, *_OTHERS, "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout"}
    | {"attn_logit_softcapping", "cat", "config", "contiguous", "dropout", "eager_attention_forward", "functional"}
    | {"get_interface", "getattr", "head_dim", "is_kv_shared_layer", "is_sliding", "k_layernorm", "layer_idx"}
    | {"layer_type", "nn", "num_heads", "num_key_value_heads", "q_layernorm", "qk_layernorm", "reshape"}
    | {"residual_dropout", "rotary_ndims", "scaling", "shape", "sinks", "size", "sliding_window"}
    | {"store_full_length_kv", "torch", "training", "transpose", "update", "use_qk_norm", "use_rope", "view"}
)


@dataclass(frozen=True, slots=True)
class FusedRotaryAttention:
    """The layer's own linear layers and norms, with two kernels between them.

    A step with a row whose adapter changes a norm runs the layer's own code.
    """

    own_forward: Callable[..., Any]
    layer: int
    joined: LinearGroup  # q, k and v; q and k, if v is k before its norm; q alone, if another layer's k and v are read
    output: LoraLinear
    query_norm: nn.Module | None  # of each head, before the rotation (Qwen 3, Gemma 3)
    key_norm: nn.Module | None
    value_norm: nn.Module | None  # (Gemma 4)
    changes: Sequence[ChangeTable]  # of these norms
    settings: AttentionSettings
    cache: KVCache
    attention: Attention
    context: StepContext[StepInputs]
    kernels: LayerKernels
    stores: str | None = None  # under which name later layers find its k and v
    reads: str | None = None  # under which name it finds those of a layer before
    is_halved: bool = False  # the tables of cos and sin hold the half that both halves of a head share

    @property
    def is_plain(self) -> bool:
        """True for attention as Llama's, perhaps with norms of queries and keys, which larger kernels know."""
        others = self.value_norm, self.stores, self.reads, self.settings.sinks
        return len(self.joined.parts) == len(_PARTS) and others == (None,) * 4 and not self.is_halved

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *arguments: Any, **keywords: Any
    ) -> Any:
        """hidden_states [1, tokens, size] -> the same shape, and None."""
        shape = self.cache.shape
        step, size = self.context.step.of_kind(shape.kind_of(self.layer)), shape.layers[self.layer].head_dim
        if step.changes_any(self.changes):
            return self.own_forward(hidden_states, position_embeddings, *arguments, **keywords)
        y = self.joined(hidden_states[0])
        q, *own = (_heads(y[:, columns], size) for columns in self.joined.columns)
        q = q if self.query_norm is None else self.query_norm.forward(q)
        if self.reads is None:
            k, v = own[0], own[-1]
            v = v if self.value_norm is None else self.value_norm.forward(v)
            k = k if self.key_norm is None else self.key_norm.forward(k)
        else:
            k, v = (one[0].transpose(0, 1) for one in keywords["shared_kv_states"][self.reads])
            self.cache.write(self.layer, k, v, step.cache_positions)
            k, v = q[:, :0], q[:, :0]
        cos, sin = tables(step, *position_embeddings, is_halved=self.is_halved)
        pools, form = self.cache.layer(self.layer), self.cache.shape.form
        self.kernels.rotate_store(q, k, v, cos, sin, step.cache_positions, pools, form)
        if self.stores is not None:
            keywords["shared_kv_states"][self.stores] = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        out = self.attention(self.layer, q, k, v, step, self.settings)
        found: Tensor = self.output(out.flatten(1)[None])
        return found, None


def could_be(module: nn.Module) -> bool:
    """True for modules with projections of q and o, and of k and v or none, that name nothing that attention of such a
    kind has no use for.
    """
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    linears = [name for name in (*_PARTS, "o_proj") if isinstance(getattr(module, name, None), LoraLinear)]
    is_like = {"q_proj", "o_proj"} <= {*linears} and own <= {*linears, *_NORMS}
    return is_like and hasattr(module, "layer_idx") and names_only(module, _NAMES)


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedRotaryAttention]:
    """Those for whole and for halved tables, if attention runs in C, q, k and v lie in one piece of memory and norms,
    if there are any, are those of single heads.
    """
    layer: Any = module.layer_idx
    settings, cache, path = parts.settings.get(layer), parts.cache, parts.paths[module]
    if settings is None or not isinstance(parts.attention, native_attention.Backend):
        return []
    names = [name for name in _PARTS if isinstance(getattr(module, name, None), LoraLinear)]
    kind: Any = getattr(module, "layer_type", None)
    reads = kind if getattr(module, "is_kv_shared_layer", False) else None
    query_norm, key_norm, value_norm = norms = [getattr(module, name, None) for name in _NORMS]
    wanted = _PARTS[:1] if reads is not None else _PARTS if value_norm is None else names
    joined = join_packed([module.get_submodule(name) for name in names]) if (*names,) == (*wanted,) else None  # type: ignore[misc]
    weights = [getattr(norm, "weight", None) for norm in norms if norm is not None]
    size = cache.shape.layers[layer].head_dim
    if joined is None or any(weight is not None and weight.shape != (size,) for weight in weights):
        return []
    output = module.get_submodule("o_proj")
    assert isinstance(output, LoraLinear)
    changes = [parts.slots.changes_of(f"{path}.{name}") for name in _NORMS]
    found = FusedRotaryAttention(
        module.forward, layer, joined, output, query_norm, key_norm, value_norm, changes, settings, cache,
        parts.attention, parts.context, parts.kernels,
        kind if getattr(module, "store_full_length_kv", False) else None, reads,
    )  # fmt: skip
    return [found, replace(found, is_halved=True)]


def tables(step: StepInputs, cos: Tensor, sin: Tensor, *, is_halved: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin [1, tokens, rotated] as kernels read them, [tokens, rotated] float32, made once for all layers."""
    key = "cos and sin", id(cos), is_halved
    if key not in step.prepared:
        wide = (table[0].float() for table in (cos, sin))
        made = [torch.cat([one, one], -1) if is_halved else one.contiguous() for one in wide]
        step.prepared[key] = made, cos  # which keeps its identity from another
    (own_cos, own_sin), _ = step.prepared[key]
    return own_cos, own_sin


def _heads(y: Tensor, size: int) -> Tensor:
    """[tokens, heads * size] -> a view [tokens, heads, size]."""
    return y.view(len(y), -1, size)
