"""The frozen model with its linear layers wrapped for LoRA deltas, and hooks on its other modules for rows' changes."""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from lora_serve.core.config import ModelConfig
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.loading.frozen_model import LoadedModel
from lora_serve.model.loading.observation import is_linear
from lora_serve.model.loading.positions import serve_by_row
from lora_serve.model.lora.kernels import LoraKernel, create_kernel
from lora_serve.model.lora.lora_linear import ChangedModule, LoraLinear
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step.step_context import Step, StepContext


class AdaptedModel(Generic[Step]):
    """The base of generating and pooling models: all modules that adapters touch."""

    def __init__(self, loaded: LoadedModel, slots: LoraSlots, config: ModelConfig, context: StepContext[Step]) -> None:
        self.module = loaded.module
        self.spec = loaded.spec
        self.device = loaded.device
        self.context = context
        serve_by_row(loaded, context)
        self._linears: dict[str, FrozenLinear] = {}
        self.kernel = create_kernel(config.lora_kernel, slots)
        self._wrap_linears(loaded, self.kernel, slots)
        for path, site in loaded.observation.sites.items():
            if path not in self._linears:
                hook = ChangedModule(site, slots.changes_of(path), self.context, path == self.spec.input_embedding)
                self.module.get_submodule(path).register_forward_hook(hook)

    def linear(self, path: str) -> FrozenLinear:
        """The frozen layer inside a linear layer's wrapper."""
        return self._linears[path]

    def parameters_of(self, path: str) -> dict[str, Tensor]:
        """A module's own parameters in its checkpoint's form; a quantised weight is left out."""
        if path not in self._linears:
            return dict(self.module.get_submodule(path).named_parameters(recurse=False))
        linear = self._linears[path]
        weight, bias = linear.dense(), linear.bias
        found = {} if weight is None else {"weight": weight.t() if linear.is_transposed else weight}
        return found if bias is None else {**found, "bias": bias}

    def embedding_scale(self, path: str) -> float:
        """The factor of an embedding's rows (Gemma 3); 1.0 in most models."""
        return float(getattr(self.module.get_submodule(path), "embed_scale", 1.0))

    def _wrap_linears(self, loaded: LoadedModel, kernel: LoraKernel, slots: LoraSlots) -> None:
        embedding = self.module.get_parameter(f"{self.spec.input_embedding}.weight")
        head = self.spec.output_head if self.spec.pooling is None else self.spec.pooling.label_layer
        for path, index in slots.module_index.items():
            linear = self.module.get_submodule(path)
            assert is_linear(linear)
            base = self._linears[path] = FrozenLinear(linear, shared_weight=linear.weight is embedding)
            wrapped = LoraLinear(
                base,
                index,
                kernel,
                slots.changes_of(path),
                self.context,
                sees_outputs=loaded.observation.sites[path].is_output_head,
                is_output_head=path == head,
            )
            self.module.set_submodule(path, wrapped)
