"""Linear layers whose product with the input an adapter changes as a whole, and so has to be computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.frozen_linear import FrozenLinear


class OwnLinear:
    """y = x W^T + bias with the adapter's own W, and its own bias or the base's (modules_to_save); a `Change`.

    An output head may have more or fewer rows than the base's (a resized vocabulary), and then its own bias.
    """

    def __init__(self, base: FrozenLinear, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        """parameters: weight as the base's checkpoint holds it ([out, in]; Conv1D [in, out]), bias [out]."""
        self._base = base
        self._parameters = parameters
        self._device = device
        weight = parameters["weight"].t() if base.is_transposed else parameters["weight"]
        source = nn.Linear(base.in_features, len(weight), bias=False, device="meta")
        bias = parameters.get("bias", base.bias)
        source.weight = nn.Parameter(weight.to(device, base.dtype).contiguous(), requires_grad=False)
        if bias is not None:
            source.bias = nn.Parameter(bias.to(device, base.dtype), requires_grad=False)
        self._linear = FrozenLinear(source)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._parameters.values())

    def to(self, device: torch.device) -> OwnLinear:
        return self if device == self._device else OwnLinear(self._base, self._parameters, device)

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        y[..., : self._linear.out_features].copy_(self._linear(inputs[0]))


@dataclass(frozen=True, slots=True)
class InputGain:
    """y = W (gain * x) + bias, from y = W x + bias: (IA)^3 of a feed-forward layer; a `Change`."""

    base: FrozenLinear
    gain: Tensor  # [in_features]

    @property
    def num_bytes(self) -> int:
        return self.gain.nbytes

    def to(self, device: torch.device) -> InputGain:
        return InputGain(self.base, self.gain.to(device))

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        y.add_(self.base.product((inputs[0] * (self.gain - 1)).to(self.base.dtype)))
