"""Gated feed-forward layers (arXiv 2002.05202): down(act(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_serve.model.fusion.parts import FusionParts, join_packed, names_only
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.native.layer_kernels import ACTIVATIONS, Gate, LayerKernels

STAGE = 1
_PARTS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"
_NAMES = frozenset({*_PARTS, _ACTIVATION})


class FusedGatedMLP:
    """The layer's own three linear layers, with one kernel between them."""

    def __init__(self, joined: LinearGroup, down: LoraLinear, activation: str, kernels: LayerKernels) -> None:
        self.joined = joined
        self.down = down
        self.activation = activation
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        both = self.joined(x.reshape(-1, x.shape[-1]))
        y: Tensor = self.down(self._kernels.gated(both, Gate(self.activation))[None])
        return y.view(x.shape)


def could_be(module: nn.Module) -> bool:
    """True for modules of three linear layers and an activation that name nothing else."""
    parts = [getattr(module, name, None) for name in _PARTS]
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    is_like = all(isinstance(part, LoraLinear) for part in parts) and own <= set(_PARTS)
    return is_like and names_only(module, _NAMES)


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedGatedMLP]:
    """One, if the activation is known and gate and up lie in one piece of memory."""
    gate, up, down = (module.get_submodule(name) for name in _PARTS)
    assert isinstance(gate, LoraLinear)
    assert isinstance(up, LoraLinear)
    assert isinstance(down, LoraLinear)
    sizes = {gate.base.out_features, up.base.out_features, down.base.in_features}
    activation = next((name for name in ACTIVATIONS if _computes(module, name, parts.kernels)), None)
    joined = join_packed((gate, up)) if activation is not None and len(sizes) == 1 else None
    if activation is None or joined is None:
        return []
    return [FusedGatedMLP(joined, down, activation, parts.kernels)]


def _computes(module: nn.Module, activation: str, kernels: LayerKernels) -> bool:
    """True if that is the module's activation, for small numbers and large: a probe's numbers may not tell."""
    grid = torch.linspace(-20.0, 20.0, 1024)
    found = kernels.gated(torch.cat([grid, torch.ones_like(grid)])[None], Gate(activation))[0]
    expected = getattr(module, _ACTIVATION)(grid)
    return torch.allclose(found.float(), expected, rtol=1e-5 + torch.finfo(found.dtype).eps, atol=1e-6)
