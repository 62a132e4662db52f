"""Layers whose weight stays as a checkpoint packs it: small integers or FP8 numbers, and scales, on CPUs.

Inputs are never rounded: a product is that of the dequantised weight, in float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from lora_serve.model.loading.frozen_weight import FrozenWeight, Panels, StoredLinear, joined_rows, square_norms
from lora_serve.model.loading.packed_weight import PackedWeight, Scales
from lora_serve.model.native import library
from lora_serve.model.native.coded_linear import CodedLinear, code

_ROWS_AT_ONCE = 256  # of a weight that is dequantised, so that no whole copy of it is made


class KeptWeight(nn.Module, FrozenWeight):
    """Codes [out, in] of a byte each and the scales beside them: the product wherever there is no other."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        """`dtype`: the model's own."""
        super().__init__()
        beside = weight.beside
        self.group_size = beside.group_size
        for name, tensor in {
            "codes": weight.codes.contiguous(),
            "scales": beside.scales.contiguous(),
            "zeros": beside.zeros,
            "groups": beside.groups,
        }.items():
            self.register_buffer(name, tensor)
        self.out_features, self.device = len(weight.codes), weight.codes.device
        self.dtype, self.sum_dtype = dtype, torch.float32

    @property
    def packed_weight(self) -> PackedWeight:
        return PackedWeight(self.codes, Scales(self.scales, self.group_size, self.zeros, self.groups))  # type: ignore[arg-type]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.cat([x.float() @ rows.t() for rows in self.dequantized()], dim=-1)
        return y if bias is None else y + bias

    def row_square_norms(self) -> Tensor:
        return torch.cat([square_norms(rows) for rows in self.dequantized()])

    def dequantized(self) -> Iterator[Tensor]:
        """The weight in float32, a few rows at a time."""
        for start in range(0, self.out_features, _ROWS_AT_ONCE):
            yield self.packed_weight.rows(slice(start, start + _ROWS_AT_ONCE)).dequantized(torch.float32)

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        first = weights[0]
        if any((one.group_size, one.dtype) != (first.group_size, first.dtype) for one in weights):
            return None
        if any(not _is_same(one.groups, first.groups) for one in weights):
            return None
        of_codes = joined_rows([one.codes for one in weights])  # type: ignore[misc]
        of_scales = joined_rows([one.scales for one in weights])  # type: ignore[misc]
        zeros = [one.zeros for one in weights]
        of_zeros = None if any(part is None for part in zeros) else joined_rows(zeros)  # type: ignore[arg-type]
        if of_codes is None or of_scales is None or (of_zeros is None and any(part is not None for part in zeros)):
            return None
        beside: Sequence[Tensor | None] = of_zeros or [None] * len(of_codes)
        return [
            cls(PackedWeight(codes, Scales(scales, first.group_size, zero, first.groups)), first.dtype)  # type: ignore[arg-type]
            for codes, scales, zero in zip(of_codes, of_scales, beside, strict=True)
        ]


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second


class KeptPanels(Panels):
    """The weight in panels of its own codes, for this project's products on CPUs (`native/codes.h`)."""

    packed: CodedLinear

    def dense(self) -> None:
        return None

    def row_square_norms(self) -> Tensor:
        return torch.cat([square_norms(rows) for rows in self.dequantized()])

    def dequantized(self) -> Iterator[Tensor]:
        """The weight in float32, a few rows at a time."""
        return self.packed.dequantized()


def _frozen(weight: PackedWeight, dtype: torch.dtype) -> KeptWeight | KeptPanels:
    """The weight in the best form for its device and the model's type."""
    beside = weight.beside
    if library.why_not(weight.codes.device, dtype) is None:
        groups = torch.arange(weight.codes.shape[1]) // beside.group_size if beside.groups is None else beside.groups
        if (packed := code(weight.codes, beside.scales, beside.zeros, groups, dtype)) is not None:
            return KeptPanels(packed)
    return KeptWeight(weight, dtype)


class KeptLinear(StoredLinear):
    """A loaded model's layer with a weight that stays packed."""

    def __init__(self, like: nn.Linear, weight: PackedWeight) -> None:
        """`like`: the layer in the model's own type, whose weight is not read. `weight`: on its device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.bias = like.bias
        self._frozen = _frozen(weight, like.weight.dtype)
        if isinstance(self._frozen, KeptPanels):
            self.register_buffer("panels", self._frozen.packed.panels)  # so that its bytes are counted
        of_its_shape = torch.zeros((), dtype=torch.int8).expand(self.out_features, self.in_features)
        self.weight = nn.Parameter(of_its_shape, requires_grad=False)

    @property
    def frozen_weight(self) -> KeptWeight | KeptPanels:
        return self._frozen

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that it has
        bias = None if self.bias is None else self.bias.float()
        return self._frozen.multiply(input, bias).to(input.dtype)


def kept_packed(like: nn.Linear, device: torch.device) -> Callable[[nn.Linear, PackedWeight], StoredLinear] | None:
    """The function that makes a layer like this one with a weight as it is packed; None: the device has no product of
    it, and the weight is dequantised.
    """
    has_product = device.type == "cpu" and library.why_not(device, torch.float32) is None
    return KeptLinear if has_product else None
