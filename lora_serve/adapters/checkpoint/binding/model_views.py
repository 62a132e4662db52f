"""A model under the other names that an adapter's trainer may have seen.

The same weights are `encoder.layer.0...` of a model without a head and `bert.encoder.layer.0...` below one; those of a
language model are `model.layers.0...` by itself, `model.language_model.layers.0...` inside one that also sees images,
and `language_model.model.layers.0...` there before transformers 4.52. PEFT names tensors, targets and patterns after
the model it wrapped, so an adapter is bound to a view of the served model in which its names are the trainer's, and
only as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter
from lora_serve.adapters.checkpoint.binding.tensor_names import PREFIX
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
