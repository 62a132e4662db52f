"""Latent attention in one call (`native/latent.c`), made of parts that are fused already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.attention import native as native_attention
from lora_serve.model.fusion.kinds.latent_attention import FusedLatentAttention
from lora_serve.model.fusion.kinds.norm import are_fused
from lora_serve.model.fusion.native_step import NativeCall, are_native, weight_of
from lora_serve.model.fusion.parts import FusionParts
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import operators as native
from lora_serve.model.step_context import ChangeTable

STAGE = 2


class NativeLatentAttention:
    """`FusedLatentAttention`, whose parts run where a row's adapter changes one of its modules."""

    def __init__(self, parts: FusedLatentAttention, slots: LoraSlots, changes: Sequence[ChangeTable]) -> None:
        """`changes`: tables by slot of every module inside, kept up to date by `LoraSlots`."""
        self.by_parts: Callable[..., Any] = parts
        self._parts, self._changes = parts, changes
        assert isinstance(parts.attention, native_attention.Backend)
        query = (parts.query or parts.output, slice(0))  # without one its place is not read
        linears = (*parts.joined.parts, query[0], parts.keys, parts.output)
        columns = (*parts.joined.columns, *[slice(0)] * 3)
        self._run, scratch_bytes = native.load_latent_attention(parts.kernels.dtype)
        self._layer = _layer_of(parts)
        self._call = NativeCall(parts.attention, slots, linears, columns, 1, scratch_bytes(self._layer))

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *arguments: Any, **keywords: Any
    ) -> Any:
        """hidden_states [1, tokens, size] -> the same shape, and None."""
        parts = self._parts
        step = parts.context.step.of_kind(parts.cache.shape.kind_of(parts.layer))
        if hidden_states.dtype != parts.kernels.dtype or step.changes_any(self._changes):
            return parts(hidden_states, position_embeddings, *arguments, **keywords)
        x = hidden_states.contiguous()
        y = torch.empty_like(x)
        self._call.adapt(self._layer)
        found = self._call.step(step, *position_embeddings)
        self._run(
            self._layer, found.step, x.data_ptr(), found.scratch.data_ptr(), *parts.cache.addresses(parts.layer),
            y.data_ptr(),
        )  # fmt: skip
        return y, None


def could_be(module: nn.Module) -> bool:
    """True for latent attention that is fused."""
    return isinstance(module.__dict__.get("forward"), FusedLatentAttention)


def candidates(module: nn.Module, parts: FusionParts) -> list[NativeLatentAttention]:
    """One, if all linear layers and norms run in C."""
    fused: FusedLatentAttention = module.__dict__["forward"]
    linears = [*fused.joined.parts, fused.keys, fused.output, *([] if fused.query is None else [fused.query])]
    norms = [fused.latent_norm, *([] if fused.query_norm is None else [fused.query_norm])]
    if not are_native(*linears) or not are_fused(*norms) or fused.settings.sinks is not None:
        return []
    inside = [f"{parts.paths[module]}.{name}" for name, _ in module.named_modules() if name]
    return [NativeLatentAttention(fused, parts.slots, [parts.slots.changes_of(name) for name in inside])]


def _layer_of(parts: FusedLatentAttention) -> native.Latent:
    heads, size = parts.cache.shape.layers[parts.layer]
    layer = native.Latent(
        joined=weight_of(parts.joined),
        keys=weight_of(parts.keys),
        output=weight_of(parts.output),
        latent_norm=parts.latent_norm.__dict__["forward"].native(),
        heads=heads,
        own=size - parts.rotated,
        rotated=parts.rotated,
        value=parts.value,
        block_size=parts.cache.block_size,
        window=parts.settings.window or 0,
        chunk=parts.settings.chunk or 0,
        by_pairs=parts.by_pairs,
        scale=parts.settings.scale,
        softcap=parts.settings.softcap or 0.0,
    )
    if parts.query is not None and parts.query_norm is not None:
        layer.query = weight_of(parts.query)
        layer.query_norm = parts.query_norm.__dict__["forward"].native()
    return layer
