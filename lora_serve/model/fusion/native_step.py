"""Layers in one native call: the step and its adapters in the form that these functions read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.attention import native as native_attention
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.lora.kernels import native as native_lora
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import operators as native
from lora_serve.model.step_context import StepInputs


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step in the form that a layer's function reads, and the tensors it points at."""

    step: native.Step
    scratch: Tensor
    cos: Tensor  # the model's own object: another one belongs to another pass
    kept: tuple[Any, ...]


class NativeCall:
    """The part of a call that follows from the step and the slots."""

    def __init__(
        self,
        backend: native_attention.Backend,
        slots: LoraSlots,
        linears: Sequence[LoraLinear],
        columns: Sequence[slice],
        group: int,
        scratch_bytes: int,
    ) -> None:
        """`columns`: of a joined product, by linear layer. `group`: query heads of a KV head. `scratch_bytes`: of each
        token; layers alike in these two share one native step.
        """
        self._backend, self._slots = backend, slots
        self._linears, self._columns = linears, columns
        self._group, self._scratch_bytes = group, scratch_bytes
        self._key = NativeCall, group, scratch_bytes
        self._tables: Any = None

    def adapt(self, layer: Any) -> None:
        """Brings a layer's addresses of adapters up to date."""
        if self._slots.tables is not self._tables:
            self._tables = self._slots.tables
            layer.adapters = native.array_of(native.Adapters, [*map(self._adapters, range(len(self._linears)))])

    def step(self, step: StepInputs, cos: Tensor, sin: Tensor) -> NativeStep:
        """The step, worked out once for all layers."""
        found: NativeStep | None = step.prepared.get(self._key)
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
                tokens, len(step.lora), own_cos.shape[-1], len(pieces.table), pieces.most_tokens,
                self._backend.cache.shape.form.number, passes, step.cache_positions.data_ptr(), own_cos.data_ptr(),
                own_sin.data_ptr(), pieces.blocks.data_ptr(), pieces.table.data_ptr(),
            )  # fmt: skip
            scratch = torch.empty(tokens * self._scratch_bytes, dtype=torch.uint8)
            found = NativeStep(native_step, scratch, cos, (passes, own_cos, own_sin, pieces, step.lora))
            step.prepared[self._key] = found
        return found

    def _adapters(self, index: int) -> native.Adapters:
        linear = self._linears[index]
        addresses = self._slots.tables.addresses(linear.module)
        return native.Adapters(*addresses, self._columns[index].start or 0, linear.base.out_features)


def are_native(*linears: LoraLinear) -> bool:
    """True if linear layers and what adapters add to them run in C."""
    return all(linear.base.packed is not None and isinstance(linear.kernel, native_lora.Kernel) for linear in linears)


def weight_of(linear: LoraLinear | LinearGroup) -> native.Weight:
    """A linear layer's weight, or that of several joined."""
    assert linear.base.packed is not None
    return native.Weight.of(linear.base.packed, linear.base.bias)
