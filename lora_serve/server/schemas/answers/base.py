"""The bases of the schemas of answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

T = TypeVar("T", bound=BaseModel)


class Answer(BaseModel):
    """The base of all of them: an answer may hold more, as later versions will."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Page(Answer):
    """A list that is answered in pages; `last_id` is the `after` of the next."""

    object: Literal["list"]
    has_more: bool
    last_id: str | None


class Deleted(Answer):
    deleted: Literal[True]


def with_fields_of(kind: type, left_out: Collection[str] = (), **instead: Any) -> Callable[[type[T]], type[T]]:
    """Decorates a schema: it has, behind its own fields, those of a frozen class that is answered as it is.

    `instead`: types of fields that are answered in another form, or as some of the values only.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in left_out}

    def decorated(schema: type[T]) -> type[T]:
        own = schema.model_fields
        more: dict[str, Any] = {name: (instead.get(name, hint), ...) for name, hint in hints.items() if name not in own}
        module, text = schema.__module__, schema.__doc__
        return create_model(schema.__name__, __base__=schema, __module__=module, __doc__=text, **more)

    return decorated
