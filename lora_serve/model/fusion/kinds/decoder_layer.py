"""Decoder layers like Llama's in one call (`native/decoder_layer.c`), made of parts that are fused already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.kinds.attention import FusedRotaryAttention
from lora_serve.model.fusion.kinds.gated_mlp import FusedGatedMLP
from lora_serve.model.fusion.kinds.norm import FusedNorm
from lora_serve.model.fusion.parts import FusionParts, names_only
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.lora.kernels import native as native_lora
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import operators as native
from lora_serve.model.native.layer_kernels import ACTIVATIONS
from lora_serve.model.step_context import ChangeTable, StepInputs

STAGE = 2
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


@dataclass(frozen=True, slots=True)
class _NativeStep:
    """A step in the form that the layer's function reads, and the tensors it points at."""

    step: native.Step
    scratch: Tensor
    cos: Tensor  # the model's own object: another one belongs to another pass
    kept: tuple[Any, ...]


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
        self._slots, self._changes = slots, changes
        backend = self._attention.attention
        assert isinstance(backend, native_attention.Backend)
        self._backend = backend
        attention = self._attention
        self._linears = (*attention.joined.parts, attention.output, *mlp.joined.parts, mlp.down)
        self._columns = (*attention.joined.columns, slice(0), *mlp.joined.columns, slice(0))
        self._run, scratch_bytes = native.load_decoder_layer(attention.cache.shape.dtype)
        self._layer = _layer_of(parts)
        self._tables: Any = None
        self._scratch_bytes: int = scratch_bytes(self._layer)
        self._group = self._layer.heads // self._layer.kv_heads
        self._shared = FusedDecoderLayer, self._group, self._scratch_bytes  # layers alike in these have one native step
        self._index = attention.layer

    def __call__(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Runs the layer on hidden_states [1, tokens, size], changed in place and returned."""
        step = self._attention.context.step
        embeddings = keywords.get("position_embeddings")
        if embeddings is None or not hidden_states.is_contiguous() or step.changes_any(self._changes):
            return self.by_parts(hidden_states, *arguments, **keywords)
        if self._slots.tables is not self._tables:
            self._tables = self._slots.tables
            self._layer.adapters = native.array_of(native.Adapters, [*map(self._adapters, range(7))])
        found = self._native_step(step, *embeddings)
        self._run(
            self._layer, found.step, hidden_states.data_ptr(), found.scratch.data_ptr(),
            *self._attention.cache.addresses(self._index),
        )  # fmt: skip
        return hidden_states

    def _native_step(self, step: StepInputs, cos: Tensor, sin: Tensor) -> _NativeStep:
        found: _NativeStep | None = step.prepared.get(self._shared)
        if found is None or found.cos is not cos:
            pieces = self._backend.pieces(step, self._group)
            own_cos, own_sin = cos[0].float().contiguous(), sin[0].float().contiguous()
            passes = native.array_of(
                native.Pass,
                [
                    native.Pass(t.pieces.data_ptr(), len(t.pieces), None if t.weights is None else t.weights.data_ptr())
                    for t in step.lora
                ],
            )
            tokens = step.token_ids.shape[1]
            native_step = native.Step(
                tokens, len(step.lora), own_cos.shape[-1], len(pieces.table), pieces.most_tokens, passes,
                step.cache_positions.data_ptr(), own_cos.data_ptr(), own_sin.data_ptr(), pieces.blocks.data_ptr(),
                pieces.table.data_ptr(),
            )  # fmt: skip
            scratch = torch.empty(tokens * self._scratch_bytes, dtype=torch.uint8)
            found = _NativeStep(native_step, scratch, cos, (passes, own_cos, own_sin, pieces, step.lora))
            step.prepared[self._shared] = found
        return found

    def _adapters(self, index: int) -> native.Adapters:
        linear = self._linears[index]
        addresses = self._slots.tables.addresses(linear.module)
        return native.Adapters(*addresses, self._columns[index].start or 0, linear.base.out_features)


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
    if not is_known or not _are_native(attention.output, mlp.down):
        return []
    if len(norms) == 1 or not all(isinstance(norm.__dict__.get("forward"), FusedNorm) for norm in norms):
        return []
    path = parts.paths[module]
    inside = [f"{path}.{name}" for name, _ in module.named_modules() if name]
    return [FusedDecoderLayer(module, fused, parts.slots, [parts.slots.changes_of(name) for name in inside])]


def _are_native(*linears: LoraLinear) -> bool:
    return all(linear.base.packed is not None and isinstance(linear.kernel, native_lora.Kernel) for linear in linears)


def _layer_of(parts: tuple[FusedNorm, FusedRotaryAttention, FusedNorm, FusedGatedMLP]) -> native.Layer:
    before_attention, attention, before_mlp, mlp = parts
    heads, settings = attention.cache.shape.layers[attention.layer], attention.settings
    layer = native.Layer(
        joined_attention=_weight_of(attention.joined),
        output=_weight_of(attention.output),
        joined_mlp=_weight_of(mlp.joined),
        down=_weight_of(mlp.down),
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


def _weight_of(linear: LoraLinear | LinearGroup) -> native.Weight:
    assert linear.base.packed is not None
    return native.Weight.of(linear.base.packed, linear.base.bias)
