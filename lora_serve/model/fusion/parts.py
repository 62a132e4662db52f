"""The parts of the served model that a fused layer is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lora_serve.model.attention import Attention, AttentionSettings
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native.layers import LayerKernels
from lora_serve.model.step.step_context import StepContext, StepInputs


@dataclass(frozen=True, slots=True)
class FusionParts:
    """The model and the objects that its layers share."""

    module: nn.Module
    cache: KVCache
    slots: LoraSlots
    attention: Attention
    context: StepContext[StepInputs]
    settings: Mapping[int, AttentionSettings]  # by layer, known once the model has run
    kernels: LayerKernels = field(default_factory=LayerKernels.load)

    def path(self, module: nn.Module) -> str:
        """The place of a module in the model."""
        return next((path for path, one in self.module.named_modules() if one is module), "")
