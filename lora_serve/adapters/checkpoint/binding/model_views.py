"""A pooling model under the other names that an adapter's trainer may have seen.

The same weights are `encoder.layer.0...` of a model without a head and `bert.encoder.layer.0...` below one. PEFT names
tensors, targets and patterns after the model it wrapped, so an adapter is bound to a view of the served model in
which its names are the trainer's, and only as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lora_serve.adapters.checkpoint.binding.bound import BoundAdapter
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

T = TypeVar("T")


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


def bind_to_view(spec: ModelSpec, bind: Callable[[ModelSpec], BoundAdapter]) -> BoundAdapter:
    """Binds to the model as it is served or, if that fails, to a view of it.

    Raises InvalidAdapterError: the refusal with the fewest reasons.
    """
    try:
        return bind(spec)
    except InvalidAdapterError as error:
        refusal = error
    for view in _views(spec):
        try:
            return view.undo(bind(view.spec))
        except InvalidAdapterError as error:
            refusal = min(refusal, error, key=lambda one: len(one.reasons))
    raise refusal


def _views(spec: ModelSpec) -> Iterator[_View]:
    if spec.pooling is None:
        return
    prefix = spec.pooling.backbone + "."
    inside = {path: path.removeprefix(prefix) for path in _paths(spec) if path.startswith(prefix)}
    yield _view(spec, inside or {path: prefix + path for path in _paths(spec)})


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
    )
    return _View(view, {name: path for path, name in names.items()})
