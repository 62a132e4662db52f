"""Binds an adapter's tensors to the base model's linear layers: every tensor to exactly one place, or none at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lora_serve.adapters.peft_config import LoraConfig
from lora_serve.adapters.safetensors_header import TensorInfo
from lora_serve.adapters.targets import ranks_and_scales, targeted
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape, ModelSpec

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight\Z")


@dataclass(frozen=True, slots=True)
class BoundModule:
    """One adapted linear layer: y += scale * (x A^T) B^T with A [rank, in_features], B [out_features, rank]."""

    a_name: str
    b_name: str
    rank: int
    scale: float


def bind(config: LoraConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> dict[str, BoundModule]:
    """module path -> its tensors. Raises InvalidAdapterError naming every tensor or module that does not fit."""
    sides, reasons = _sort(tensors, spec)
    table = ranks_and_scales(config, sorted(sides))
    bound = {}
    for module, names in sorted(sides.items()):
        rank, scale = table[module]
        problems = _problems(names, tensors, spec.linears[module], rank, module)
        reasons += problems
        if not problems:
            bound[module] = BoundModule(names["A"], names["B"], rank, scale)
    reasons += _coverage(config, sides, spec)
    if reasons or not bound:
        raise InvalidAdapterError(reasons or ["it adapts no layer of the base model"])
    return bound


def _sort(tensors: Iterable[str], spec: ModelSpec) -> tuple[dict[str, dict[str, str]], list[str]]:
    sides: dict[str, dict[str, str]] = {}
    reasons = []
    for name in tensors:
        match = _TENSOR.match(name)
        if match is None:
            reasons.append(f"tensor {name[:200]!r} is not a LoRA weight of a linear layer")
        elif match["module"] not in spec.linears:
            reasons.append(f"tensor {name[:200]!r} belongs to no linear layer of {spec.architecture}")
        elif match["side"] in sides.setdefault(match["module"], {}):
            reasons.append(f"tensor {name[:200]!r} is there twice under two names")
        else:
            sides[match["module"]][match["side"]] = name
    return sides, reasons


def _problems(
    names: Mapping[str, str], tensors: Mapping[str, TensorInfo], linear: LinearShape, rank: int, module: str
) -> list[str]:
    problems = []
    expected = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
    for side, shape in expected.items():
        if side not in names:
            problems.append(f"lora_{side} of {module} is missing")
        elif tensors[names[side]].shape != shape:
            problems.append(
                f"tensor {names[side]!r} has shape {list(tensors[names[side]].shape)}, but its rank and the base "
                f"model's layer ask for {list(shape)}"
            )
    return problems


def _coverage(config: LoraConfig, sides: Mapping[str, object], spec: ModelSpec) -> list[str]:
    """PEFT would make up missing weights and drop those it does not target; neither is what was trained."""
    targets = targeted(config, tuple(spec.linears))
    missing = [
        f"target_modules names {module}, but the file has no weights for it" for module in targets - sides.keys()
    ]
    beyond = [
        f"the file has weights for {module}, but the config does not target it" for module in sides.keys() - targets
    ]
    return sorted(missing) + sorted(beyond)
