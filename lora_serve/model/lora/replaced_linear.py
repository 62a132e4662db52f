"""Linear layers whose product with the input an adapter changes as a whole, and so has to be computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.frozen_linear import FrozenLinear


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """A layer that an adapter trained in full (modules_to_save), in host memory; `to` makes the `OwnLinear` of it.

    An output head may have more or fewer rows than the base's (a resized vocabulary), and then its own bias.
    """

    base: FrozenLinear
    parameters: Mapping[str, Tensor]  # weight as the base's checkpoint holds it ([out, in]; Conv1D [in, out]), bias

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters.values())

    def to(self, device: torch.device) -> OwnLinear:
        """Laid out for the device's products, which takes a while: on a CPU it is done by the loader already."""
        weight = self.parameters["weight"].t() if self.base.is_transposed else self.parameters["weight"]
        bias = self.parameters.get("bias", self.base.bias)
        source = nn.Linear(self.base.in_features, len(weight), bias=False, device="meta")
        source.weight = nn.Parameter(weight.to(device, self.base.dtype).contiguous(), requires_grad=False)
        if bias is not None:
            source.bias = nn.Parameter(bias.to(device, self.base.dtype), requires_grad=False)
        return OwnLinear(FrozenLinear(source), self.num_bytes, device)

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        raise AssertionError("it is not on a device yet")


@dataclass(frozen=True, slots=True)
class OwnLinear:
    """y = x W^T + bias with the adapter's own W, and its own bias or the base's; a `Change`."""

    linear: FrozenLinear
    num_bytes: int
    device: torch.device

    def to(self, device: torch.device) -> OwnLinear:
        assert device == self.device, "its layout is this device's"
        return self

    def apply(self, y: Tensor | tuple[Tensor, ...], inputs: tuple[Any, ...], scale: float) -> None:
        assert isinstance(y, Tensor)
        assert scale == 1.0, "only deltas can be scaled"
        y[..., : self.linear.out_features].copy_(self.linear(inputs[0]))


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
        assert scale == 1.0, "only deltas can be scaled"
        y.add_(self.base.product((inputs[0] * (self.gain - 1)).to(self.base.dtype)))
