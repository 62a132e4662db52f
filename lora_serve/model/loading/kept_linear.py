"""Layers whose weight stays as a checkpoint packs it: small integers or FP8 numbers, and scales, on CPUs.

Inputs are never rounded: a product is that of the dequantised weight, in float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lora_serve.model.loading.frozen_weight import Panels, StoredLinear, square_norms
from lora_serve.model.loading.packed_weight import PackedWeight
from lora_serve.model.native import library
from lora_serve.model.native.coded_linear import CodedLinear, code


class KeptPanels(Panels):
    """The weight in panels of its own codes, for this project's products on CPUs (`native/codes.h`)."""

    packed: CodedLinear

    def dense(self) -> None:
        return None

    def row_square_norms(self) -> Tensor:
        return torch.cat([square_norms(rows) for rows in self.packed.dequantized()])


class KeptLinear(StoredLinear):
    """A loaded model's layer with a weight that stays packed."""

    def __init__(self, like: nn.Linear, packed: CodedLinear) -> None:
        """`like`: the layer in the model's own type, whose weight is not read."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.bias = like.bias
        self._frozen = KeptPanels(packed)
        self.register_buffer("panels", packed.panels)  # so that its bytes are counted
        of_its_shape = torch.zeros((), dtype=torch.int8).expand(self.out_features, self.in_features)
        self.weight = nn.Parameter(of_its_shape, requires_grad=False)

    @property
    def frozen_weight(self) -> KeptPanels:
        return self._frozen

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that it has
        bias = None if self.bias is None else self.bias.float()
        return self._frozen.multiply(input, bias).to(input.dtype)


# Makes a layer like one that is loaded with its weight as it is packed; None: that has no room for such numbers.
Keep = Callable[[nn.Linear, PackedWeight], StoredLinear | None]


def kept_packed(device: torch.device, dtype: torch.dtype) -> Keep | None:
    """The function for layers of the model's `dtype`; None: there is no product of packed weights, which are
    dequantised.
    """
    return _keep if library.why_not(device, dtype) is None else None


def _keep(like: nn.Linear, weight: PackedWeight) -> KeptLinear | None:
    beside = weight.beside
    groups = torch.arange(weight.codes.shape[1]) // beside.group_size if beside.groups is None else beside.groups
    packed = code(weight.codes, beside.scales, beside.zeros, groups, like.weight.dtype)
    return None if packed is None else KeptLinear(like, packed)
