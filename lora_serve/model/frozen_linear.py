"""A linear layer of the frozen base: weights laid out once for the fastest product this device has.

On CPUs that is this project's own product, in float32 and in bfloat16 (`native/packed_linear.c`): a layout that is
opaque and for inference only, which is just what a frozen weight allows.
Quantised weights stay as their library packed them: torchao's are tensors that know their own product, bitsandbytes'
layers are called whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lora_serve.core.model_spec import LinearShape
from lora_serve.model.loading.number_type import is_quantized
from lora_serve.model.loading.observation import linear_shape
from lora_serve.model.native import operators
from lora_serve.model.native.operators import PackedLinear, PanelKind, join

_ROWS_AT_ONCE = 256  # of the identity, when a packed weight is only known by its products


class FrozenLinear(nn.Module):
    """y [..., out] = x [..., in] W^T + bias, from an `nn.Linear`, a quantised one or GPT-2's transposed `Conv1D`."""

    def __init__(self, source: nn.Linear | Conv1D, *, shared_weight: bool = False) -> None:
        """`shared_weight`: the weight is also an embedding, which stays beside a copy laid out for products."""
        super().__init__()
        shape = linear_shape(source)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.bias: Tensor | None = None if source.bias is None else source.bias.detach()
        self._layer: nn.Module | None = None
        self.packed: PackedLinear | None = None
        self._square_norms: Tensor | None = None
        self.is_transposed = isinstance(source, Conv1D)  # how its checkpoint, and so an adapter's, holds the weight
        weight = source.weight.detach()
        if not isinstance(source, Conv1D) and not _is_matrix(weight, shape):
            self._layer = source  # bitsandbytes: only its own class can read such a weight
            source.bias = None  # type: ignore[assignment] # added here, so that `product` goes without
        elif not is_quantized(weight):
            weight = weight.t().contiguous() if isinstance(source, Conv1D) else weight
            self.packed = _packed(weight, shared_weight)
        self.dtype, self.device = _dtype(weight, self.bias), weight.device
        self._weight = weight
        if self.packed is not None:
            self._weight = weight.new_empty(0)
            self.bias = None if self.bias is None else self.bias.float()  # as sums are

    @staticmethod
    def joined(layers: Sequence[FrozenLinear]) -> FrozenLinear | None:
        """One layer [sum of out, in] whose outputs are those of layers of one input, side by side. From then on each
        has a view of its weight as its own.

        None if a weight is quantised, they are of different types, or their panels cannot lie in one piece.
        """
        weights = _joined_weights(layers)
        if weights is None:
            return None
        found = copy.copy(layers[0])
        found.bias = _joined_bias(layers)
        for layer, weight in zip((found, *layers), weights, strict=True):
            layer.place(weight)
        return found

    def place(self, weight: PackedLinear | Tensor) -> None:
        """Reads the weight [out, in] from another place from now on."""
        if isinstance(weight, PackedLinear):
            self.packed, self.out_features = weight, weight.out_features
        else:
            self._weight, self.out_features = weight, len(weight)
        self._square_norms = None

    @property
    def matrix(self) -> Tensor | None:
        """The weight [out, in] that products read; None if it is packed or quantised."""
        is_plain = self._layer is None and self.packed is None and not is_quantized(self._weight)
        return self._weight if is_plain else None

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x).to(x.dtype)

    def sums(self, x: Tensor) -> Tensor:
        """y [..., out] as it was summed: float32 where the weight is packed, else in the layer's own type."""
        return self._multiply(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x [n, in] W^T -> [n, out], without the bias; x and the product in the layer's own type."""
        return self._multiply(x, None).to(x.dtype)

    def dense(self) -> Tensor | None:
        """The weight as a plain tensor [out, in]: a copy if it is packed; None if it is quantised."""
        return self.matrix if self.packed is None else self.packed.dense()

    @torch.no_grad()
    def row_square_norms(self) -> Tensor:
        """The sum of squares of each row of W, dequantised: [out] float32. Worked out at the first call, then kept."""
        if self._square_norms is None:
            self._square_norms = self._sum_squares()
        return self._square_norms

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is not None:
            return self.packed(x.to(self.packed.dtype), bias)
        if self._layer is None:
            return F.linear(x, self._weight, bias)
        y: Tensor = self._layer(x)
        return y if bias is None else y + bias

    def _sum_squares(self) -> Tensor:
        if (dense := self.dense()) is not None:
            return _row_sums(dense)
        if self._layer is None and type(self._weight).dequantize is not Tensor.dequantize:
            return _row_sums(self._weight.dequantize())
        return self._sum_squares_of_products()

    def _sum_squares_of_products(self) -> Tensor:
        """Row norms of a weight that is only known by its products: those with the unit vectors are its columns."""
        dtype = torch.get_default_dtype() if self._layer is not None else self._weight.dtype
        total = torch.zeros(self.out_features, device=self._weight.device)
        for start in range(0, self.in_features, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, self.in_features)
            unit = torch.zeros(stop - start, self.in_features, dtype=dtype, device=self._weight.device)
            unit.diagonal(start).fill_(1)
            total += self.product(unit).float().square_().sum(0)
        return total


def _dtype(weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The type of a layer's inputs and outputs, as far as its parameters tell."""
    known = [t.dtype for t in (weight, bias) if t is not None and t.is_floating_point()]
    return known[0] if known else torch.get_default_dtype()


def _joined_weights(layers: Sequence[FrozenLinear]) -> list[PackedLinear | Tensor] | None:
    """The joined weight, and each layer's view of it."""
    packed = [layer.packed for layer in layers if layer.packed is not None]
    plain = [layer.matrix for layer in layers if layer.matrix is not None]
    if len(packed) == len(layers):
        found = join(packed)
        return None if found is None else [found[0], *(own for _, own in found[1])]
    if len(plain) != len(layers) or len({(weight.dtype, weight.device, weight.shape[1]) for weight in plain}) != 1:
        return None
    whole = torch.cat(plain)
    return [whole, *torch.split(whole, [len(weight) for weight in plain])]


def _joined_bias(layers: Sequence[FrozenLinear]) -> Tensor | None:
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(one.out_features) if one.bias is None else one.bias for one in layers])


def _packed(weight: Tensor, shared_weight: bool) -> PackedLinear | None:
    """The weight in panels; None if it cannot be packed, or is shared and a copy would take four bytes a number."""
    if operators.why_not(weight) is not None:
        return None
    packed = PackedLinear.of(weight)
    return None if shared_weight and packed.kind is PanelKind.FLOATS else packed


def _is_matrix(weight: Tensor, shape: LinearShape) -> bool:
    return weight.is_floating_point() and weight.shape == (shape.out_features, shape.in_features)


def _row_sums(weight: Tensor) -> Tensor:
    """[out, in] -> [out] float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.square_()
