"""Adapters of a resized vocabulary (`resize_token_embeddings` before the training), or with labels of their own: sizes,
and what they must bring.

PEFT saves the whole embedding and output head of such a model beside the adapter, unless it is told not to. What the
base model does not have, rows for tokens of its own, must then come from the file: transformers would make them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter
from lora_serve.adapters.checkpoint.binding.tensor_names import TensorPlace
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.model_spec import ModelSpec

MAX_LABELS = 65536  # the logits of a whole step become as wide as its largest head
MAX_GROWTH = 65536  # rows beyond the base's: the logits of a whole step become as wide as its largest vocabulary


def ends_of(spec: ModelSpec) -> tuple[str, str]:
    """The modules that have a row for every token: input embedding and output head."""
    return spec.input_embedding, spec.output_head


def resized_to(
    config: PeftConfig, places: Mapping[TensorPlace, str], tensors: Mapping[str, TensorInfo], spec: ModelSpec
) -> int:
    """The size of the vocabulary of the adapter's model; 0: the base's."""
    if not all(ends_of(spec)):
        return 0
    sizes = {
        tensors[name].shape[0]
        for place, name in places.items()
        if place.role == "parameter" and place.parameter == "weight" and place.module in ends_of(spec)
        if tensors[name].shape
    } - {spec.vocab_size}
    if sizes:
        return max(sizes)
    newest = max((token for _, ids in config.trained_tokens for token in ids), default=0)
    return newest + 1 if newest >= spec.vocab_size else 0


def check_resized(bound: BoundAdapter, spec: ModelSpec) -> Iterator[str]:
    """Reasons why an adapter with a vocabulary of its own cannot be served."""
    size, (embedding, head) = bound.vocab_size, ends_of(spec)
    rows = {spec.embeddings[embedding].num_embeddings, spec.linears[head].out_features if head in spec.linears else 0}
    if rows != {spec.vocab_size}:
        yield f"its vocabulary has {size} tokens, and this base model's cannot be resized"
    if size > spec.vocab_size + MAX_GROWTH:
        yield f"its vocabulary has {size} tokens, more than {MAX_GROWTH} above the base model's {spec.vocab_size}"
        return  # what is missing of so many is not even counted
    for module in ends_of(spec):
        if module in bound.linears or module in bound.embeddings or module in bound.deltas:
            yield (
                f"its vocabulary has {size} tokens, the base model's {spec.vocab_size}: a low-rank delta or a bias "
                f"of {module} cannot go with that; train it by modules_to_save or trainable_token_indices"
            )
        if missing := _missing(bound, spec, module):
            yield missing


def _missing(bound: BoundAdapter, spec: ModelSpec, module: str) -> str | None:
    """The rows of `module` for new tokens that the file does not hold."""
    own = bound.parameters.get(module, {})
    if "weight" in own:
        lacks_bias = "bias" in spec.modules[module] and "bias" not in own
        return f"{module}.weight is resized, but the file does not hold its bias" if lacks_bias else None
    tokens = bound.tokens.get(spec.input_embedding if spec.ties_embeddings else module)
    new = set(range(spec.vocab_size, bound.vocab_size)) - set(() if tokens is None else tokens.token_ids)
    if not new:
        return None
    return (
        f"the file holds no row of {module} for the new tokens {min(new)} to {max(new)}: save the adapter with "
        "save_embedding_layers=True"
    )


def labels_in(places: Mapping[TensorPlace, str], tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> int:
    """The number of labels of the adapter's own label layer; 0: it has none."""
    if spec.pooling is None or not spec.pooling.label_layer:
        return 0
    name = places.get(TensorPlace(spec.pooling.label_layer, "parameter", "weight"))
    shape = tensors[name].shape if name is not None else ()
    return shape[0] if shape else 0


def check_head(bound: BoundAdapter, spec: ModelSpec) -> Iterator[str]:
    """Reasons to refuse an adapter whose head would be untrained, or too large to be served."""
    if bound.num_labels > MAX_LABELS:
        yield f"its head has {bound.num_labels} labels, more than {MAX_LABELS}"
    for module in () if spec.pooling is None else spec.pooling.untrained:
        if spec.modules.get(module, {}).keys() - bound.parameters.get(module, {}).keys():
            yield f"the base model's checkpoint has no weights for {module}, so the adapter must bring them whole"
