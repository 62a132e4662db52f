"""Gated feed-forward layers (arXiv 2002.05202): down(act(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

from torch import Tensor, nn

from lora_serve.model.fusion.joined import JoinedLinears
from lora_serve.model.lora_linear import LoraLinear
from lora_serve.model.native.layers import ACTIVATIONS, LayerKernels

_PARTS = ("gate_proj", "up_proj", "down_proj")


class FusedGatedMLP:
    """The layer's own three linear layers, with one kernel between them."""

    def __init__(self, joined: JoinedLinears, down: LoraLinear, activation: str, kernels: LayerKernels) -> None:
        self.joined = joined
        self.down = down
        self.activation = activation
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        both = self.joined(x.reshape(-1, x.shape[-1]))
        y: Tensor = self.down(self._kernels.gated(both, self.activation)[None])
        return y.view(x.shape)


def could_be(module: nn.Module) -> bool:
    """Whether it looks like one."""
    parts = [getattr(module, name, None) for name in _PARTS]
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return all(isinstance(part, LoraLinear) for part in parts) and own <= set(_PARTS)


def candidates(module: nn.Module, kernels: LayerKernels) -> list[FusedGatedMLP]:
    """What might take its place."""
    gate, up, down = (module.get_submodule(name) for name in _PARTS)
    assert isinstance(gate, LoraLinear)
    assert isinstance(up, LoraLinear)
    assert isinstance(down, LoraLinear)
    sizes = {gate.base.out_features, up.base.out_features, down.base.in_features}
    joined = JoinedLinears.of((gate, up)) if len(sizes) == 1 else None
    if joined is None:
        return []
    return [FusedGatedMLP(joined, down, activation, kernels) for activation in ACTIVATIONS]
