"""The number of tokens before each packed one, for layers that ask transformers' cache and not `position_ids` for it.

Llama 4's layers without rotary positions are such: by it they scale their queries (arXiv 2501.19399).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.step_context import StepContext, StepInputs


class PackedPast:
    """Stands for transformers' cache before one layer of attention; K and V are attention's own concern."""

    def __init__(self, context: StepContext[StepInputs]) -> None:
        self._context = context

    def get_seq_length(self, *_: Any) -> Tensor:
        """How far each packed token's position is from its place in the step, [num_tokens] int64."""
        positions = self._context.step.position_ids[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns both as they are."""
        return key, value


def tell_past(module: nn.Module, past: PackedPast) -> None:
    """Hands `past` to the layers of attention whose code asks how long the cache is."""

    def give(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        return arguments, {**keywords, "past_key_values": past}

    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        if hasattr(part, "layer_idx") and code is not None and "get_seq_length" in code.co_names:
            part.register_forward_pre_hook(give, with_kwargs=True)
