"""Root mean square norms (arXiv 1910.07467), with a weight or, as in Gemma, with one that starts at zero, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.fusion.parts import FusionParts, names_only
from lora_serve.model.native.layer_kernels import LayerKernels
from lora_serve.model.native.operators import Norm

STAGE = 1
_OFFSETS = (0.0, 1.0)
_NAMES = frozenset(
    {"_norm", "dtype", "eps", "float", "float32", "mean", "pow", "rsqrt", "to", "torch", "type_as"}
    | {"variance_epsilon", "weight", "with_scale"}
)


class FusedNorm:
    """y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)."""

    def __init__(self, module: nn.Module, offset: float, kernels: LayerKernels) -> None:
        weight: Any = getattr(module, "weight", None)
        self._weight: Tensor | None = None if weight is None else weight.detach().float()
        self._epsilon = _epsilon(module)
        self._offset = offset
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self._kernels.rms_norm(x, self._weights(x.shape[-1]), self._offset, self._epsilon)

    def native(self) -> Norm:
        """The norm as a larger kernel takes it."""
        assert self._weight is not None, "a larger kernel knows norms with weights only"
        return Norm(self._weight.data_ptr(), self._offset, self._epsilon)

    def _weights(self, size: int) -> Tensor:
        """A norm without a weight learns its size from its first input."""
        if self._weight is None:
            self._weight = torch.ones(size)
        return self._weight


def could_be(module: nn.Module) -> bool:
    """True for modules that are called RMSNorm and name nothing that such a norm has no use for."""
    parameters = dict(module.named_parameters())
    is_like = not parameters or (list(parameters) == ["weight"] and parameters["weight"].dim() == 1)
    return (
        "RMSNorm" in type(module).__name__
        and is_like
        and all(parameter.is_floating_point() for parameter in parameters.values())
        and _epsilon(module) > 0
        and names_only(module, _NAMES)
    )


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedNorm]:
    """One per way in which models count the weight."""
    return [FusedNorm(module, offset, parts.kernels) for offset in (_OFFSETS if [*module.parameters()] else (0.0,))]


def _epsilon(module: nn.Module) -> float:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return float(found) if isinstance(found, float | int) else 0.0


def are_fused(*norms: Any) -> bool:
    """True if norms run in C, and have weights, as larger kernels want them."""
    return all(isinstance(norm.__dict__.get("forward"), FusedNorm) and hasattr(norm, "weight") for norm in norms)
