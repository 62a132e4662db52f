"""Attention layers with rotary positions (arXiv 2104.09864) in two halves, as Llama's: q, k and v as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lora_serve.model.attention import Attention
from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.parts import FusionParts, join_packed, names_only
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.native.operators import LayerKernels
from lora_serve.model.step_context import AttentionSettings, ChangeTable, StepContext, StepInputs

STAGE = 1
_PARTS = ("q_proj", "k_proj", "v_proj")
_OTHERS = ("o_proj", "q_norm", "k_norm")
_NAMES = frozenset(
    {*_PARTS, *_OTHERS, "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout"}
    | {"attn_logit_softcapping", "cat", "config", "contiguous", "dropout", "eager_attention_forward", "functional"}
    | {"get_interface", "getattr", "head_dim", "is_sliding", "k_layernorm", "layer_idx", "nn", "num_heads"}
    | {"num_key_value_heads", "q_layernorm", "qk_layernorm", "reshape", "residual_dropout", "rotary_ndims", "scaling"}
    | {"shape", "size", "sliding_window", "torch", "training", "transpose", "update", "use_qk_norm", "use_rope", "view"}
)


@dataclass(frozen=True, slots=True)
class FusedRotaryAttention:
    """The layer's own linear layers and norms, with two kernels between them.

    A step with a row whose adapter changes a norm runs the layer's own code.
    """

    own_forward: Callable[..., Any]
    layer: int
    joined: LinearGroup
    output: LoraLinear
    query_norm: nn.Module | None  # of each head, before the rotation (Qwen 3, Gemma 3)
    key_norm: nn.Module | None
    changes: Sequence[ChangeTable]  # of both norms
    settings: AttentionSettings
    cache: KVCache
    attention: Attention
    context: StepContext[StepInputs]
    kernels: LayerKernels

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *arguments: Any, **keywords: Any
    ) -> Any:
        """hidden_states [1, tokens, size] -> the same shape, and None."""
        step, size = self.context.step, self.cache.shape.layers[self.layer].head_dim
        if step.changes_any(self.changes):
            return self.own_forward(hidden_states, position_embeddings, *arguments, **keywords)
        y = self.joined(hidden_states[0])
        q, k, v = (_heads(y[:, columns], size) for columns in self.joined.columns)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.forward(q), self.key_norm.forward(k)
        cos, sin = (table[0].float().contiguous() for table in position_embeddings)
        self.kernels.rotate_store(q, k, v, cos, sin, step.cache_positions, self.cache.layer(self.layer))
        out = self.attention(self.layer, q, k, v, step, self.settings)
        found: Tensor = self.output(out.flatten(1)[None])
        return found, None


def could_be(module: nn.Module) -> bool:
    """True for modules with q, k, v and o projections that name nothing that such attention has no use for."""
    parts = [getattr(module, name, None) for name in (*_PARTS, "o_proj")]
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    is_like = all(isinstance(part, LoraLinear) for part in parts) and own <= {*_PARTS, *_OTHERS}
    return is_like and hasattr(module, "layer_idx") and names_only(module, _NAMES)


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedRotaryAttention]:
    """One, if attention runs in C, q, k and v lie in one piece of memory and norms, if there are any, are those of
    single heads.
    """
    linears = [module.get_submodule(name) for name in (*_PARTS, "o_proj")]
    q, k, v, output = (linear for linear in linears if isinstance(linear, LoraLinear))
    layer: Any = module.layer_idx
    settings, cache, path = parts.settings.get(layer), parts.cache, parts.paths[module]
    joined = join_packed((q, k, v)) if settings is not None else None
    if settings is None or joined is None or not isinstance(parts.attention, native_attention.Backend):
        return []
    query_norm, key_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    weights = [getattr(norm, "weight", q.weight[:0]) for norm in (query_norm, key_norm) if norm is not None]
    if any(weight.shape != (cache.shape.layers[layer].head_dim,) for weight in weights):
        return []
    changes = [parts.slots.changes_of(f"{path}.{name}") for name in ("q_norm", "k_norm")]
    return [
        FusedRotaryAttention(
            module.forward, layer, joined, output, query_norm, key_norm, changes, settings, cache, parts.attention,
            parts.context, parts.kernels,
        )
    ]  # fmt: skip


def _heads(y: Tensor, size: int) -> Tensor:
    """[tokens, heads * size] -> a view [tokens, heads, size]."""
    return y.view(len(y), -1, size)
