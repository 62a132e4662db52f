"""The seam of frozen weights: how W [out, in] of a linear layer lies, is multiplied by, joined and read back.

A kind is one class, here or in a file of its own beside the `StoredLinear` that a loader gives a model. A kind that
compiled layers may read is a module, so that its tensors are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lora_serve.core.model_spec import LinearShape
from lora_serve.model.loading.number_type import is_quantized
from lora_serve.model.loading.observation import linear_shape
from lora_serve.model.native import operators
from lora_serve.model.native.operators import PackedLinear, PanelKind, join

_ROWS_AT_ONCE = 256  # of the identity, when a weight is only known by its products


class FrozenWeight(ABC):
    """W [out, in] of a linear layer."""

    out_features: int
    dtype: torch.dtype  # of inputs
    sum_dtype: torch.dtype  # of sums, and of a bias
    device: torch.device
    stored: Tensor | None = None  # its numbers, if `join` may move them to another place

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] W^T + bias [out] -> [..., out] as it was summed."""

    def multiply_exactly(self, x: Tensor) -> Tensor:
        """x [n, in] W^T -> [n, out] by x as it is, where `multiply` rounds it first."""
        return self.multiply(x, None)

    def dense(self) -> Tensor | None:
        """The weight as a plain tensor; None if it is quantised."""
        return None

    def row_square_norms(self) -> Tensor:
        """The sum of squares of each row, dequantised: [out] float32."""
        dense = self.dense()
        assert dense is not None, "each kind of quantised weight has its own way"
        return square_norms(dense)

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        """Weights of one input in one piece, and each as a view of that; None if they cannot lie in one."""
        return None


class StoredLinear(nn.Linear, ABC):
    """A loaded model's layer whose weight is of a kind of its own."""

    @property
    @abstractmethod
    def frozen_weight(self) -> FrozenWeight: ...

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that it has
        return self.frozen_weight.multiply(input, self.bias)


class Matrix(nn.Module, FrozenWeight):
    """A plain tensor [out, in], which torch multiplies."""

    stored: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.stored = weight
        self.out_features, self.device = len(weight), weight.device
        self.dtype = self.sum_dtype = weight.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.stored, bias)

    def dense(self) -> Tensor:
        return self.stored

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        found = joined_rows([one.stored for one in weights])
        return None if found is None else [cls(weight) for weight in found]


class Panels(FrozenWeight):
    """This project's own layout and product on CPUs, in float32 and in bfloat16 (`native/packed_linear.c`): opaque and
    for inference only, which is just what a frozen weight allows.
    """

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.out_features, self.device = packed.out_features, packed.panels.device
        self.dtype, self.sum_dtype = packed.dtype, torch.float32

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.packed(x.to(self.dtype), bias)

    def dense(self) -> Tensor | None:
        return self.packed.dense()

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        found = join([one.packed for one in weights])
        return None if found is None else [cls(one) for one in (found[0], *(own for _, own in found[1]))]


class LibraryWeight(nn.Module, FrozenWeight):
    """A weight as its library packed it: torchao's are tensors that know their own product, bitsandbytes' layers are
    called whole.
    """

    def __init__(self, source: nn.Linear | Conv1D) -> None:
        super().__init__()
        shape = linear_shape(source)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.weight = source.weight.detach()
        known = [t.dtype for t in (self.weight, source.bias) if t is not None and t.is_floating_point()]
        self.dtype = self.sum_dtype = known[0] if known else torch.get_default_dtype()
        self.device = self.weight.device
        self._layer: nn.Module | None = None
        if not _is_matrix(self.weight, shape):
            self._layer = source
            source.bias = None  # type: ignore[assignment] # added here, so that products go without

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._layer is None:
            return F.linear(x, self.weight, bias)
        y: Tensor = self._layer(x)
        return y if bias is None else y + bias

    def row_square_norms(self) -> Tensor:
        if self._layer is None and type(self.weight).dequantize is not Tensor.dequantize:
            return square_norms(self.weight.dequantize())
        # Products with the unit vectors are its columns.
        dtype = torch.get_default_dtype() if self._layer is not None else self.weight.dtype
        total = torch.zeros(self.out_features, device=self.device)
        for start in range(0, self.in_features, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, self.in_features)
            unit = torch.zeros(stop - start, self.in_features, dtype=dtype, device=self.device)
            unit.diagonal(start).fill_(1)
            total += self.multiply(unit, None).float().square_().sum(0)
        return total


def weight_of(source: nn.Linear | Conv1D, *, is_shared: bool) -> FrozenWeight:
    """The weight of a layer, laid out for its device. `is_shared`: it is also an embedding, which stays: no copy is
    made of it that would take four bytes a number.
    """
    weight = source.weight.detach()
    if isinstance(source, StoredLinear):
        return source.frozen_weight
    is_matrix = isinstance(source, Conv1D) or _is_matrix(weight, linear_shape(source))
    if is_quantized(weight) or not is_matrix:
        return LibraryWeight(source)
    weight = weight.t().contiguous() if isinstance(source, Conv1D) else weight
    if operators.why_not(weight) is None:
        packed = PackedLinear.of(weight)
        if not (is_shared and packed.kind is PanelKind.FLOATS):
            return Panels(packed)
    return Matrix(weight)


def joined_rows(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Tensors [rows, size] one below the other, and each as a view of that; None if they do not fit."""
    if len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) != 1:
        return None
    whole = torch.cat(list(weights))
    return [whole, *torch.split(whole, [len(weight) for weight in weights])]


def square_norms(weight: Tensor) -> Tensor:
    """[out, in] -> the sum of squares of each row, [out] float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.square_()


def _is_matrix(weight: Tensor, shape: LinearShape) -> bool:
    return weight.is_floating_point() and weight.shape == (shape.out_features, shape.in_features)
