"""The parts of the served model that a fused layer is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_serve.model.attention import Attention, AttentionSettings
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_linear import LoraLinear
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native.decoder_layer import Weight
from lora_serve.model.native.layers import LayerKernels
from lora_serve.model.native.packed_linear import PackedLinear, join
from lora_serve.model.step.step_context import StepContext, StepInputs


@dataclass(frozen=True, slots=True)
class JoinedLinears:
    """y = [x W_1^T + b_1, x W_2^T + b_2, ...], to which each part's adapters are then applied."""

    parts: tuple[LoraLinear, ...]
    columns: tuple[slice, ...]  # of y, by part
    _packed: PackedLinear
    _bias: Tensor | None  # float32

    @staticmethod
    def of(parts: Sequence[LoraLinear]) -> JoinedLinears | None:
        """The joined layers; None if their weights cannot lie in one piece of panels."""
        bases = [part.base for part in parts]
        packed = [base.packed for base in bases]
        found = join([one for one in packed if one is not None])
        if found is None or len(packed) != len([one for one in packed if one is not None]):
            return None
        for base, (_, own) in zip(bases, found[1], strict=True):
            base.packed = own
        biases = [torch.zeros(b.out_features) if b.bias is None else b.bias for b in bases]
        bias = None if all(base.bias is None for base in bases) else torch.cat(biases).float()
        return JoinedLinears(tuple(parts), tuple(columns for columns, _ in found[1]), found[0], bias)

    def native(self) -> Weight:
        """The product without adapters, as a larger kernel takes it."""
        return Weight.of(self._packed, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, sum of out] float32."""
        x = x.to(self._packed.dtype)
        y = self._packed(x, self._bias)
        for part, columns in zip(self.parts, self.columns, strict=True):
            part.adapt(y[:, columns], x)
        return y


@dataclass(frozen=True, slots=True)
class FusionParts:
    """The model and the objects that its layers share."""

    module: nn.Module
    cache: KVCache
    slots: LoraSlots
    attention: Attention
    context: StepContext[StepInputs]
    settings: Mapping[int, AttentionSettings]  # by layer, known once the model has run
    kernels: LayerKernels
    paths: Mapping[nn.Module, str]  # the place of every module in the model
