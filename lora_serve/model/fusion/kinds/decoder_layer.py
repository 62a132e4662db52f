"""Decoder layers like Llama's in one call (`native/decoder_layer.c`), made of parts that are fused already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.kinds.attention import FusedRotaryAttention
from lora_serve.model.fusion.kinds.gated_mlp import FusedGatedMLP
from lora_serve.model.fusion.kinds.norm import FusedNorm, are_fused
from lora_serve.model.fusion.native_step import NativeCall, are_native, weight_of
from lora_serve.model.fusion.parts import FusionParts, names_only
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import operators as native
from lora_serve.model.native.layer_kernels import ACTIVATIONS
from lora_serve.model.step_context import ChangeTable

STAGE = 2
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class FusedDecoderLayer:
    """h += attention(norm(h)); h += mlp(norm(h)).

    A step with a row whose adapter changes a module of this layer (see `Change`) runs the layer's parts one by one.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: tuple[FusedNorm, FusedRotaryAttention, FusedNorm, FusedGatedMLP],
        slots: LoraSlots,
        changes: Sequence[ChangeTable],
    ) -> None:
        """`changes`: tables by slot of every module inside, kept up to date by `LoraSlots`."""
        self.by_parts: Callable[..., Any] = module.forward
        _, self._attention, _, mlp = parts
        self._changes = changes
        attention = self._attention
        assert isinstance(attention.attention, native_attention.Backend)
        linears = (*attention.joined.parts, attention.output, *mlp.joined.parts, mlp.down)
        columns = (*attention.joined.columns, slice(0), *mlp.joined.columns, slice(0))
        self._run, scratch_bytes = native.load_decoder_layer(attention.cache.shape.dtype)
        self._layer = layer = _layer_of(parts)
        group = layer.heads // layer.kv_heads
        self._call = NativeCall(attention.attention, slots, linears, columns, group, scratch_bytes(layer))
        self._index, self._kind = attention.layer, attention.cache.shape.kind_of(attention.layer)

    def __call__(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Runs the layer on hidden_states [1, tokens, size], changed in place and returned."""
        step = self._attention.context.step.of_kind(self._kind)
        embeddings = keywords.get("position_embeddings")
        if embeddings is None or not hidden_states.is_contiguous() or step.changes_any(self._changes):
            return self.by_parts(hidden_states, *arguments, **keywords)
        self._call.adapt(self._layer)
        found = self._call.step(step, *embeddings)
        self._run(
            self._layer, found.step, hidden_states.data_ptr(), found.scratch.data_ptr(),
            *self._attention.cache.addresses(self._index),
        )  # fmt: skip
        return hidden_states


def could_be(module: nn.Module) -> bool:
    """True for modules of two fused norms, fused attention and a fused MLP that name nothing else."""
    kinds = (FusedNorm, FusedRotaryAttention, FusedNorm, FusedGatedMLP)
    return names_only(module, frozenset(_PARTS)) and all(
        isinstance(getattr(getattr(module, name, None), "__dict__", {}).get("forward"), kind)
        for name, kind in zip(_PARTS, kinds, strict=True)
    )


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedDecoderLayer]:
    """One, if attention and all linear layers run in C."""
    fused = tuple(module.get_submodule(name).__dict__["forward"] for name in _PARTS)
    attention, mlp = fused[1], fused[3]
    norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
    is_known = attention.is_plain and isinstance(attention.attention, native_attention.Backend)
    if not is_known or not are_native(attention.output, mlp.down):
        return []
    if len(norms) == 1 or not are_fused(*norms):
        return []
    path = parts.paths[module]
    inside = [f"{path}.{name}" for name, _ in module.named_modules() if name]
    return [FusedDecoderLayer(module, fused, parts.slots, [parts.slots.changes_of(name) for name in inside])]


def _layer_of(parts: tuple[FusedNorm, FusedRotaryAttention, FusedNorm, FusedGatedMLP]) -> native.Layer:
    before_attention, attention, before_mlp, mlp = parts
    heads, settings = attention.cache.shape.layers[attention.layer], attention.settings
    layer = native.Layer(
        joined_attention=weight_of(attention.joined),
        output=weight_of(attention.output),
        joined_mlp=weight_of(mlp.joined),
        down=weight_of(mlp.down),
        before_attention=before_attention.native(),
        before_mlp=before_mlp.native(),
        heads=attention.joined.parts[0].base.out_features // heads.head_dim,
        kv_heads=heads.num_heads,
        size=heads.head_dim,
        block_size=attention.cache.block_size,
        window=settings.window or 0,
        chunk=settings.chunk or 0,
        activation=ACTIVATIONS.index(mlp.activation),
        scale=settings.scale,
        softcap=settings.softcap or 0.0,
    )
    if attention.query_norm is not None and attention.key_norm is not None:
        layer.query = attention.query_norm.__dict__["forward"].native()
        layer.key = attention.key_norm.__dict__["forward"].native()
    return layer
