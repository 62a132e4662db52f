"""What a method other than LoRA trained in full beside its own layers: `modules_to_save`, a classifier above all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_serve.adapters.checkpoint.binding.label_heads import labels_in
from lora_serve.adapters.checkpoint.binding.tensor_names import TensorPlace, place_of
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.adapters.checkpoint.targets import saved_whole
from lora_serve.core.model_spec import ModelSpec, Shape


@dataclass(frozen=True, slots=True)
class SavedModules:
    """`parameters`: module -> parameter -> tensor. `rest`: the tensors that are something else."""

    parameters: Mapping[str, Mapping[str, str]]
    num_labels: int
    rest: Mapping[str, TensorInfo]
    reasons: tuple[str, ...]


def bind_saved_modules(config: PeftConfig, tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> SavedModules:
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
    return SavedModules(parameters, num_labels, rest, tuple(reasons))


def _wanted(whole: frozenset[str], num_labels: int, spec: ModelSpec) -> Iterator[tuple[TensorPlace, Shape]]:
    label_layer = "" if spec.pooling is None else spec.pooling.label_layer
    for module in sorted(whole):
        for parameter, shape in spec.modules[module].items():
            is_own = num_labels and module == label_layer
            yield TensorPlace(module, "parameter", parameter), (num_labels, *shape[1:]) if is_own else shape
