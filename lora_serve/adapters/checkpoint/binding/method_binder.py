"""Binds the tensors of a method other than LoRA, by names and shapes alone (see `methods/`). No torch."""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter, BoundConversion, Conversions
from lora_serve.adapters.checkpoint.binding.saved_modules import bind_saved_modules
from lora_serve.adapters.checkpoint.methods import Method
from lora_serve.adapters.checkpoint.methods.compression import too_large
from lora_serve.adapters.checkpoint.peft_config import OTHER_METHODS, PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.adapters.checkpoint.targets import targeted
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape, ModelSpec

_Names = dict[str, dict[str, str]]  # module ("": the whole model) -> role -> tensor


def bind_method(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec, max_rank: int | None
) -> BoundAdapter:
    """Every tensor to its place. Raises InvalidAdapterError naming every tensor or module that does not fit."""
    method = OTHER_METHODS[config.peft_type]
    own = bind_saved_modules(config, tensors, spec)
    targets = {path: spec.linears[path] for path in sorted(targeted(config, tuple(spec.linears)))}
    plan = method.plan(config.method, targets)
    names, reasons = _sort(method, own.rest, targets)
    reasons += own.reasons
    bound = {}
    for path, shape in targets.items():
        roles = {**names.get("", {}), **names.get(path, {})}
        shapes = {role: tensors[name].shape for role, name in roles.items()}
        rank = method.bind(plan, path, shapes, shape.in_features, shape.out_features)
        if isinstance(rank, list):
            reasons += rank
        elif problem := too_large(rank, max_rank) if max_rank is not None else "":
            reasons.append(f"{path}: {problem}")
        else:
            bound[path] = BoundConversion(roles, rank, shape)
    if reasons or not bound:
        raise InvalidAdapterError(reasons or ["it adapts no layer of the base model"])
    conversions = Conversions(config.peft_type, plan, bound)
    return BoundAdapter(parameters=own.parameters, conversions=conversions, num_labels=own.num_labels)


def _sort(
    method: Method, tensors: Mapping[str, TensorInfo], targets: Mapping[str, LinearShape]
) -> tuple[_Names, list[str]]:
    names: _Names = {}
    reasons = []
    for name in tensors:
        match = method.ROLES.match(name)
        module = "" if match is None else match["module"] or ""
        if match is None or (module and module not in targets):
            reasons.append(f"tensor {name[:200]!r} belongs to no layer that the config targets")
        elif match["role"] in names.setdefault(module, {}):
            reasons.append(f"tensor {name[:200]!r} is there twice under two names")
        else:
            names[module][match["role"]] = name
    return names, reasons
