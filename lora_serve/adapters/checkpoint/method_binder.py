"""Binds the tensors of a method other than LoRA, by names and shapes alone (see `methods/`). No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_serve.adapters.checkpoint.bound import (
    BoundAdapter,
    BoundConversion,
    Conversions,
    TensorPlace,
    labels_in,
    place_of,
)
from lora_serve.adapters.checkpoint.methods import Method
from lora_serve.adapters.checkpoint.methods.factors import too_large
from lora_serve.adapters.checkpoint.peft_config import OTHER_METHODS, PeftConfig, saved_whole, targeted
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape, ModelSpec, Shape

_Names = dict[str, dict[str, str]]  # module ("": the whole model) -> role -> tensor


def bind_method(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec, max_rank: int | None
) -> BoundAdapter:
    """Binds every tensor to its place. Raises InvalidAdapterError naming every tensor or module that does not fit."""
    method = OTHER_METHODS[config.peft_type]
    own = _bind_saved_modules(config, tensors, spec)
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


@dataclass(frozen=True, slots=True)
class _SavedModules:
    """`parameters`: module -> parameter -> tensor. `rest`: the tensors that are something else."""

    parameters: Mapping[str, Mapping[str, str]]
    num_labels: int
    rest: Mapping[str, TensorInfo]
    reasons: tuple[str, ...]


def _bind_saved_modules(config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> _SavedModules:
    """Every parameter of the modules that the config names; what is missing or has a wrong shape is a reason."""
    whole = saved_whole(config, spec.modules)
    places = {place: name for name in tensors if (place := place_of(name)) is not None and place.module in whole}
    num_labels = labels_in(places, tensors, spec)
    wanted = dict(_wanted(whole, num_labels, spec))
    found = {place: name for place, name in places.items() if place in wanted}
    reasons = [
        f"{place.module}.{place.parameter} is trained, but the file does not hold it"
        for place in wanted.keys() - found.keys()
    ]
    reasons += [
        f"tensor {name!r} has shape {list(tensors[name].shape)}, but its module asks for {list(wanted[place])}"
        for place, name in found.items()
        if tensors[name].shape != wanted[place]
    ]
    parameters: dict[str, dict[str, str]] = {}
    for place, name in found.items():
        parameters.setdefault(place.module, {})[place.parameter] = name
    taken = frozenset(found.values())
    rest = {name: info for name, info in tensors.items() if name not in taken}
    return _SavedModules(parameters, num_labels, rest, tuple(reasons))


def _wanted(whole: frozenset[str], num_labels: int, spec: ModelSpec) -> Iterator[tuple[TensorPlace, Shape]]:
    label_layer = "" if spec.pooling is None else spec.pooling.label_layer
    for module in sorted(whole):
        for parameter, shape in spec.modules[module].items():
            is_own = num_labels and module == label_layer
            yield TensorPlace(module, "parameter", parameter), (num_labels, *shape[1:]) if is_own else shape
