"""A base layer with every row's own delta beside it (Hu et al., 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lora_serve.model.changes import Change
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.lora_kernels import LoraKernel
from lora_serve.model.step_context import LoraTokens, StepContext


class LoraLinear(nn.Module):
    """y = base(x), then for each token what its adapters make of y: see `LoraKernel` and `Change`."""

    def __init__(
        self,
        base: FrozenLinear,
        module: int,
        kernel: LoraKernel,
        changes: Mapping[int, tuple[Change, ...]],
        context: StepContext,
        *,
        is_output_head: bool,
    ) -> None:
        """`changes`: by slot, kept up to date by `LoraSlots`."""
        super().__init__()
        self.base = base
        self._module = module
        self._kernel = kernel
        self._changes = changes
        self._context = context
        self._is_output_head = is_output_head

    def forward(self, x: Tensor) -> Tensor:
        """x [1, num_tokens, in] (for the output head [1, num_logits, in]) -> [1, ..., out]."""
        y: Tensor = self.base(x)
        step = self._context.step
        for tokens in step.lora_logits if self._is_output_head else step.lora:
            flat_y, flat_x = y.view(-1, self.base.out_features), x.reshape(-1, self.base.in_features)
            if self._changes:
                self._change(flat_y, flat_x, tokens)
            self._kernel.add(flat_y, flat_x, self._module, tokens)
        return y

    def _change(self, y: Tensor, x: Tensor, tokens: LoraTokens) -> None:
        for segment in tokens.segments:
            here = slice(segment.start, segment.end)
            for change in self._changes.get(segment.slot, ()):
                change.apply(y[here], (x[here],), segment.scale)
