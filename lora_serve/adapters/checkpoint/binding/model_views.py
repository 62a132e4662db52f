"""The model as an adapter's trainer may have seen it: under other names, or with another vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lora_serve.adapters.checkpoint.binding.bound import PREFIX, BoundAdapter, TensorPlace
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.checkpoint.safetensors_header import TensorInfo
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

T = TypeVar("T")
_ALONE, _WRAPPED, _WRAPPED_ONCE = "model.", "model.language_model.", "language_model.model."


@dataclass(frozen=True, slots=True)
class _View:
    spec: ModelSpec
    path_of: Mapping[str, str]  # the view's path -> the served model's

    def undo(self, bound: BoundAdapter) -> BoundAdapter:
        """An adapter bound to the view, by the served model's paths."""
        converted = bound.conversions
        return replace(
            bound,
            linears=self._renamed(bound.linears),
            embeddings=self._renamed(bound.embeddings),
            deltas=self._renamed(bound.deltas),
            tokens=self._renamed(bound.tokens),
            parameters=self._renamed(bound.parameters),
            conversions=None if converted is None else replace(converted, path_of=self.path_of),
        )

    def _renamed(self, table: Mapping[str, T]) -> dict[str, T]:
        return {self.path_of[path]: value for path, value in table.items()}


def bind_to_view(spec: ModelSpec, tensors: Iterable[str], bind: Callable[[ModelSpec], BoundAdapter]) -> BoundAdapter:
    """Binds to the model as it is served or, if that fails, to a view of it that has modules of the tensors' names.

    Raises InvalidAdapterError: the refusal with the fewest reasons.
    """
    try:
        return bind(spec)
    except InvalidAdapterError as error:
        refusal = error
    inner = [name.removeprefix(PREFIX) for name in tensors]
    named = {name[: dot.start()] for name in inner for dot in re.finditer(r"\.", name)}  # paths of modules, and more
    for view in _views(spec) if named else ():
        if named.isdisjoint(view.path_of):
            continue
        try:
            return view.undo(bind(view.spec))
        except InvalidAdapterError as error:
            refusal = min(refusal, error, key=lambda one: len(one.reasons))
    raise refusal


def _views(spec: ModelSpec) -> Iterator[_View]:
    if spec.pooling is None:
        for names in _text_names(spec):
            if len(set(names.values())) == len(names):
                yield _view(spec, names)
        return
    prefix = spec.pooling.backbone + "."
    inside = {path: path.removeprefix(prefix) for path in _paths(spec) if path.startswith(prefix)}
    yield _view(spec, inside or {path: prefix + path for path in _paths(spec)})


def _text_names(spec: ModelSpec) -> Iterator[dict[str, str]]:
    """Path -> another name of each module of a language model: as checkpoints have it, alone, and in a wrapper."""
    paths = _paths(spec)
    if spec.saved_paths:
        yield {path: spec.saved_paths.get(path, path) for path in paths}
    served = _WRAPPED if any(path.startswith(_WRAPPED) for path in paths) else _ALONE
    for other, outside in ((_ALONE, ""), (_WRAPPED, ""), (_WRAPPED_ONCE, "language_model.")):
        if other != served:
            yield {p: other + p.removeprefix(served) if p.startswith(served) else outside + p for p in paths}


def _paths(spec: ModelSpec) -> frozenset[str]:
    return frozenset().union(spec.linears, spec.embeddings, spec.modules)


def _view(spec: ModelSpec, names: Mapping[str, str]) -> _View:
    """`names`: of the modules that the view has, the served model's path -> the view's."""

    def renamed(table: Mapping[str, T]) -> dict[str, T]:
        return {names[path]: value for path, value in table.items() if path in names}

    view = replace(
        spec,
        linears=renamed(spec.linears),
        embeddings=renamed(spec.embeddings),
        modules=renamed(spec.modules),
        input_embedding=names.get(spec.input_embedding, ""),
        output_head=names.get(spec.output_head, ""),
    )
    return _View(view, {name: path for path, name in names.items()})


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
