"""A base layer with every row's own LoRA delta beside it (Hu et al., 2021, arXiv 2106.09685)."""

from __future__ import annotations

from torch import Tensor, nn

from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.lora_kernels import LoraKernel
from lora_serve.model.step_context import StepContext


class LoraLinear(nn.Module):
    """y = base(x), then y[i] += scale[s_i] * (x[i] A[s_i]^T) B[s_i]^T for each token i with a slot s_i."""

    def __init__(
        self, base: FrozenLinear, module: int, kernel: LoraKernel, context: StepContext, *, is_output_head: bool
    ) -> None:
        super().__init__()
        self.base = base
        self._module = module
        self._kernel = kernel
        self._context = context
        self._is_output_head = is_output_head

    def forward(self, x: Tensor) -> Tensor:
        """x [1, num_tokens, in] (for the output head [1, num_logits, in]) -> [1, ..., out]."""
        y: Tensor = self.base(x)
        step = self._context.step
        tokens = step.lora_logits if self._is_output_head else step.lora
        if tokens.segments:
            self._kernel.add(
                y.view(-1, self.base.out_features), x.reshape(-1, self.base.in_features), self._module, tokens
            )
        return y
