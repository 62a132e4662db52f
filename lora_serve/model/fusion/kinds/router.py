"""Routers of experts: the module's own code, with its weight in panels."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn

from lora_serve.model.fusion.parts import FusionParts
from lora_serve.model.native.experts import PackedMatrix
from lora_serve.model.native.operators import PackedLinear

STAGE = 1
_MOST_ROWS = 4096  # of a weight that is held twice


class FusedRouter:
    """The forward of a module's class on a copy whose weight multiplies by this project's product."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        self._copy = copy.copy(module)
        self._copy.__dict__.update(_parameters=dict(module._parameters), _forward_hooks={}, _forward_pre_hooks={})  # noqa: SLF001
        del self._copy._parameters["weight"]  # noqa: SLF001
        self._copy.__dict__["weight"] = PackedMatrix(PackedLinear.of(weight.detach()))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """As the module's own: logits first, weights, experts."""
        return type(self._copy).forward(self._copy, *arguments, **keywords)


def could_be(module: nn.Module) -> bool:
    """True for modules of one matrix, and perhaps a bias, that return several things and multiply by it themselves."""
    parameters = dict(module.named_parameters())
    if not {"weight"} <= parameters.keys() <= {"weight", "bias"} or parameters["weight"].dim() != 2:
        return False
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    is_other = isinstance(module, nn.Linear | nn.Embedding) or "forward" in vars(module)
    return not is_other and code is not None and "linear" in code.co_names


def candidates(module: nn.Module, parts: FusionParts) -> list[FusedRouter]:
    """One, if the weight is of the kernels' type and small."""
    weight = module.get_parameter("weight")
    return [FusedRouter(module, weight)] if weight.dtype == parts.kernels.dtype and len(weight) <= _MOST_ROWS else []
