"""Adapters' deltas on experts whose weights are one stack, where `model/experts.py` computes them pair by pair.

A slot has one record for a stack, as for a linear layer, and each pair of a token and its expert finds its own A and B
through it: rows of such adapters share a captured step with all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lora_serve.core.model_spec import LinearShape
from lora_serve.model.experts import ADAPTERS, expert_modules
from lora_serve.model.loading.observation import Site
from lora_serve.model.lora.kernels import LoraKernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import StepContext


class StackLora(nn.Module):
    """The deltas of one stack of experts' weights."""

    def __init__(self, module: int, slots: LoraSlots, kernel: LoraKernel, context: StepContext[Any]) -> None:
        super().__init__()
        self.module = module
        self.slots = slots
        self.kernel = kernel
        self.context = context

    def adapt(self, y: Tensor, x: Tensor, experts: Tensor) -> None:
        """Adds to y [pairs, out], the products of x, in place. experts [pairs]; see `LoraKernel.add_pairs`."""
        step = self.context.step
        for tokens in step.lora:
            placed = tokens.on_device or tokens.placed(y.device).on_device
            if not self.slots.touches(1 << self.module, placed.all_slots):
                continue
            key = id(tokens), len(y)
            if key not in step.prepared:  # the same for all layers
                each = placed.of_each_token()
                step.prepared[key] = [one.repeat_interleave(len(y) // tokens.num_tokens) for one in each]
            slots, scales = step.prepared[key]
            self.kernel.add_pairs(y, x, self.module, slots, scales, experts)


def adapt_stacks(
    module: nn.Module, sites: Mapping[str, Site], slots: LoraSlots, kernel: LoraKernel, context: StepContext[Any]
) -> None:
    """Gives each stack of experts that see every token a module in the slots, and a `StackLora`."""
    paths = {part: path for path, part in module.named_modules()}
    for part in expert_modules(module):
        path = paths[part]
        if path not in sites:
            continue
        stacks = {name: weight.shape for name, weight in part.named_parameters(recurse=False) if weight.dim() == 3}
        order = slice(1, None) if part.is_transposed else slice(None, 0, -1)  # in, out
        slots.add_modules({f"{path}.{name}": LinearShape(*shape[order]) for name, shape in stacks.items()})
        own = {name: StackLora(slots.module_index[f"{path}.{name}"], slots, kernel, context) for name in stacks}
        part.add_module(ADAPTERS, nn.ModuleDict(own))
