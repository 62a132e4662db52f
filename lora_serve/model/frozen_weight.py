"""The seam of frozen weights: how W [out, in] of a linear layer lies, is multiplied by, joined and read back.

A kind is one class here or in a file of its own, and an entry in the table of `frozen_linear.py`. A kind that compiled
layers may read is a module, so that its tensors are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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
Source = nn.Linear | Conv1D


class FrozenWeight(ABC):
    """W [out, in] of a linear layer."""

    out_features: int
    dtype: torch.dtype  # of inputs
    sum_dtype: torch.dtype  # of sums, and of a bias
    device: torch.device

    @classmethod
    @abstractmethod
    def of(cls, source: Source, *, is_shared: bool) -> Self | None:
        """The weight of a layer; None if another kind reads it. `is_shared`: it is also an embedding, which stays."""

    @property
    def stored(self) -> Tensor | None:
        """The tensor of its numbers, of which `join` makes another; None of a kind that cannot."""
        return None

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] W^T + bias [out] -> [..., out] as it was summed."""

    @abstractmethod
    def row_square_norms(self) -> Tensor:
        """The sum of squares of each row, dequantised: [out] float32."""

    def multiply_exactly(self, x: Tensor) -> Tensor:
        """x [n, in] W^T -> [n, out] by x as it is, where `multiply` rounds it first."""
        return self.multiply(x, None)

    def dense(self) -> Tensor | None:
        """The weight as a plain tensor; None if it is quantised."""
        return None

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:  # noqa: ARG003 - most kinds cannot
        """Weights of one input in one piece, and each as a view of that; None if they cannot lie in one."""
        return None


class Matrix(nn.Module, FrozenWeight):
    """A plain tensor [out, in], which torch multiplies."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.out_features = len(weight)
        self.dtype = self.sum_dtype = weight.dtype
        self.device = weight.device

    @classmethod
    def of(cls, source: Source, *, is_shared: bool) -> Self | None:  # noqa: ARG003 - it is not copied
        return cls(plain_weight(source)) if is_plain(source) else None

    @property
    def stored(self) -> Tensor:
        return self.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def row_square_norms(self) -> Tensor:
        return square_norms(self.weight)

    def dense(self) -> Tensor:
        return self.weight

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        found = joined_rows([one.weight for one in weights])
        return None if found is None else [cls(weight) for weight in found]


@dataclass(frozen=True, slots=True)
class Panels(FrozenWeight):
    """This project's own layout and product on CPUs, in float32 and in bfloat16 (`native/packed_linear.c`): opaque and
    for inference only, which is just what a frozen weight allows.
    """

    packed: PackedLinear
    out_features: int
    dtype: torch.dtype
    sum_dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, source: Source, *, is_shared: bool) -> Self | None:
        """None, too, if it cannot be packed, or is shared and a copy would take four bytes a number."""
        if not is_plain(source) or operators.why_not(source.weight.detach()) is not None:
            return None
        packed = PackedLinear.of(plain_weight(source))
        return None if is_shared and packed.kind is PanelKind.FLOATS else cls._of(packed)

    @classmethod
    def _of(cls, packed: PackedLinear) -> Self:
        return cls(packed, packed.out_features, packed.dtype)

    @property
    def stored(self) -> Tensor:
        return self.packed.panels

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.packed(x.to(self.dtype), bias)

    def row_square_norms(self) -> Tensor:
        return square_norms(self.dense())

    def dense(self) -> Tensor:
        return self.packed.dense()

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        found = join([one.packed for one in weights])
        return None if found is None else [cls._of(one) for one in (found[0], *(own for _, own in found[1]))]


class LibraryWeight(nn.Module, FrozenWeight):
    """A weight as its library packed it: torchao's are tensors that know their own product, bitsandbytes' layers are
    called whole.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        shape = linear_shape(source)
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.weight = source.weight.detach()
        self.dtype = self.sum_dtype = _dtype(self.weight, source.bias)
        self.device = self.weight.device
        self._layer: nn.Module | None = None
        if not _is_matrix(self.weight, shape):
            self._layer = source
            source.bias = None  # type: ignore[assignment] # added here, so that products go without

    @classmethod
    def of(cls, source: Source, *, is_shared: bool) -> Self | None:  # noqa: ARG003 - it is not copied
        return None if is_plain(source) else cls(source)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._layer is None:
            return F.linear(x, self.weight, bias)
        y: Tensor = self._layer(x)
        return y if bias is None else y + bias

    def row_square_norms(self) -> Tensor:
        if self._layer is None and type(self.weight).dequantize is not Tensor.dequantize:
            return square_norms(self.weight.dequantize())
        return self._norms_of_products()

    def _norms_of_products(self) -> Tensor:
        """Products with the unit vectors are a weight's columns."""
        dtype = torch.get_default_dtype() if self._layer is not None else self.weight.dtype
        total = torch.zeros(self.out_features, device=self.device)
        for start in range(0, self.in_features, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, self.in_features)
            unit = torch.zeros(stop - start, self.in_features, dtype=dtype, device=self.device)
            unit.diagonal(start).fill_(1)
            total += self.multiply(unit, None).float().square_().sum(0)
        return total


def is_plain(source: Source) -> bool:
    """True if the layer's weight is a matrix of numbers."""
    weight: Any = source.weight
    return not is_quantized(weight) and (isinstance(source, Conv1D) or _is_matrix(weight, linear_shape(source)))


def plain_weight(source: Source) -> Tensor:
    """[out, in], whichever way the layer holds it."""
    weight = source.weight.detach()
    return weight.t().contiguous() if isinstance(source, Conv1D) else weight


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


def _dtype(weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The type of a layer's inputs and outputs, as far as its parameters tell."""
    known = [t.dtype for t in (weight, bias) if t is not None and t.is_floating_point()]
    return known[0] if known else torch.get_default_dtype()
