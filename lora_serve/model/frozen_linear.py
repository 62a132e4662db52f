"""A linear layer of the frozen base: a weight laid out once for the fastest product this device has, and a bias."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_serve.model.loading.frozen_weight import FrozenWeight, Panels, weight_of
from lora_serve.model.loading.observation import linear_shape
from lora_serve.model.native.operators import PackedLinear


class FrozenLinear(nn.Module):
    """y [..., out] = x [..., in] W^T + bias, from an `nn.Linear`, a quantised one or GPT-2's transposed `Conv1D`."""

    def __init__(self, source: nn.Linear | Conv1D, *, shared_weight: bool = False) -> None:
        """`shared_weight`: the weight is also an embedding, which stays beside a copy laid out for products."""
        super().__init__()
        shape = linear_shape(source)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.is_transposed = isinstance(source, Conv1D)  # how its checkpoint, and so an adapter's, holds the weight
        bias: Tensor | None = source.bias
        self.place(weight_of(source, is_shared=shared_weight))
        self.dtype, self.device = self.weight.dtype, self.weight.device
        self.bias = None if bias is None else bias.detach().to(self.weight.sum_dtype)

    @staticmethod
    def joined(layers: Sequence[FrozenLinear]) -> FrozenLinear | None:
        """One layer [sum of out, in] whose outputs are those of layers of one input, side by side. From then on each
        has a view of its weight as its own.

        None if their weights are of different kinds, or cannot lie in one piece.
        """
        kinds = {type(layer.weight) for layer in layers}
        weights = kinds.pop().join([layer.weight for layer in layers]) if len(kinds) == 1 else None
        if weights is None:
            return None
        found = copy.copy(layers[0])
        found.__dict__["_modules"] = {}  # which a copy would share
        found.bias = _joined_bias(layers)
        for layer, weight in zip((found, *layers), weights, strict=True):
            layer.place(weight)
        return found

    def place(self, weight: FrozenWeight) -> None:
        """Reads the weight [out, in] from another place from now on."""
        self.weight: FrozenWeight = weight
        self.__dict__["weight"] = weight  # where a module, too, is found at once
        self.out_features = weight.out_features
        self._square_norms: Tensor | None = None

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in panels, which fused layers of CPUs read; None if it lies otherwise."""
        return self.weight.packed if isinstance(self.weight, Panels) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x).to(x.dtype)

    def sums(self, x: Tensor) -> Tensor:
        """y [..., out] as it was summed: float32 where the weight is packed, else in the layer's own type."""
        return self.weight.multiply(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x [n, in] W^T -> [n, out], without the bias; x and the product in the layer's own type."""
        return self.weight.multiply(x, None).to(x.dtype)

    def exact_product(self, x: Tensor) -> Tensor:
        """`product` by x as it is, also where the products of steps round their inputs first."""
        return self.weight.multiply_exactly(x)

    def dense(self) -> Tensor | None:
        """The weight as a plain tensor [out, in]: a copy if it is packed; None if it is quantised."""
        return self.weight.dense()

    @torch.no_grad()
    def row_square_norms(self) -> Tensor:
        """The sum of squares of each row of W, dequantised: [out] float32. Worked out at the first call, then kept."""
        if self._square_norms is None:
            self._square_norms = self.weight.row_square_norms()
        return self._square_norms


def _joined_bias(layers: Sequence[FrozenLinear]) -> Tensor | None:
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(one.out_features) if one.bias is None else one.bias for one in layers])
