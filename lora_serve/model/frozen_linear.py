"""A linear layer of the frozen base: weights laid out once for the fastest product this device has.

On CPUs oneDNN's own weight layout ("prepacked") needs half the time of `F.linear` at 1 to 16 rows and the same at
more (benchmarks/README.md). It is an inference-only, opaque layout, which is just what a frozen weight allows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lora_serve.model import onednn


class FrozenLinear(nn.Module):
    """y [..., out] = x [..., in] W^T + bias, from an `nn.Linear` or GPT-2's transposed `Conv1D`."""

    def __init__(self, source: nn.Linear | Conv1D, *, shared_weight: bool = False) -> None:
        """`shared_weight`: the weight is also an embedding, so a prepacked copy would double it."""
        super().__init__()
        weight = source.weight.detach()
        if isinstance(source, Conv1D):
            weight = weight.t().contiguous()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.is_transposed = isinstance(source, Conv1D)  # how its checkpoint, and so an adapter's, holds the weight
        self.bias: Tensor | None = None if source.bias is None else source.bias.detach()
        self._is_packed = not shared_weight and onednn.can_prepack(weight)
        self._weight = onednn.prepack(weight) if self._is_packed else weight

    def forward(self, x: Tensor) -> Tensor:
        if self._is_packed:
            return onednn.linear(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x [n, in] W^T, without the bias: [n, out]."""
        return onednn.linear(x, self._weight, None) if self._is_packed else F.linear(x, self._weight)

    def dense(self) -> Tensor:
        """The weight as a plain tensor [out, in]; a copy if it is prepacked."""
        return self._weight.to_dense() if self._is_packed else self._weight

    def row_square_norms(self) -> Tensor:
        """||W[o]||^2 of each output: [out] float32."""
        norms: Tensor = torch.linalg.vector_norm(self.dense(), dim=1, dtype=torch.float32)
        return norms.square_()
