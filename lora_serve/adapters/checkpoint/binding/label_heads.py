"""Classification heads of adapters' own: as many labels as they were trained for, in place of the base's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter
from lora_serve.adapters.checkpoint.binding.tensor_names import TensorPlace
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.model_spec import ModelSpec

MAX_LABELS = 65536  # the logits of a whole step become as wide as its largest head


def labels_in(places: Mapping[TensorPlace, str], tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> int:
    """How many labels the adapter's own label layer has; 0: it has none."""
    if spec.pooling is None or not spec.pooling.label_layer:
        return 0
    name = places.get(TensorPlace(spec.pooling.label_layer, "parameter", "weight"))
    shape = tensors[name].shape if name is not None else ()
    return shape[0] if shape else 0


def check_head(bound: BoundAdapter, spec: ModelSpec) -> Iterator[str]:
    """Reasons why an adapter's answers would come from a head that is no trained one, or none that can be served."""
    if bound.num_labels > MAX_LABELS:
        yield f"its head has {bound.num_labels} labels, more than {MAX_LABELS}"
    for module in () if spec.pooling is None else spec.pooling.untrained:
        if spec.modules.get(module, {}).keys() - bound.parameters.get(module, {}).keys():
            yield f"the base model's checkpoint has no weights for {module}, so the adapter must bring them whole"
