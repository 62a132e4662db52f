"""A linear layer of the frozen base: weights laid out once for the fastest product this device has.

On CPUs oneDNN's own weight layout ("prepacked") needs half the time of `F.linear` at 1 to 16 rows and the same at
more (benchmarks/README.md). It is an inference-only, opaque layout, which is just what a frozen weight allows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

_PACK_ROWS = 16  # the batch size that oneDNN chooses its layout for; measured best over 1 .. 512 rows


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this type natively here: float32 always, bfloat16 where the CPU knows it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    mkldnn: Any = torch.ops.mkldnn
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(mkldnn._is_mkldnn_bf16_supported())
    )


class FrozenLinear(nn.Module):
    """y [..., out] = x [..., in] W^T + bias, from an `nn.Linear` or GPT-2's transposed `Conv1D`."""

    def __init__(self, source: nn.Linear | Conv1D, *, shared_weight: bool = False) -> None:
        """`shared_weight`: the weight is also an embedding, so a prepacked copy would double it."""
        super().__init__()
        weight = source.weight.t().contiguous() if isinstance(source, Conv1D) else source.weight
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", source.bias)
        self.is_packed = not shared_weight and can_prepack(weight)
        mkldnn: Any = torch.ops.mkldnn
        self._weight = mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS) if self.is_packed else weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_packed:
            mkldnn: Any = torch.ops.mkldnn
            y: Tensor = mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self.bias)
