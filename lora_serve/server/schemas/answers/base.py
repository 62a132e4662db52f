"""Pages of lists; and the base of the engine's figures, which are described by pydantic."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, create_model

T = TypeVar("T", bound=BaseModel)
Item = TypeVar("Item")


class Page(Struct, Generic[Item], kw_only=True):
    """A list that is answered in pages; `last_id` is the `after` of the next."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    last_id: str | None


class Answer(BaseModel):
    """An answer may hold more, as later versions will."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def with_fields_of(
    kind: type, left_out: Collection[str] = (), default: Any = ..., **instead: Any
) -> Callable[[type[T]], type[T]]:
    """Decorates a schema: it has, behind its own fields, those of a frozen class.

    `default`: of these; left out: none. `instead`: types of fields that have another form, or fewer values.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in left_out}

    def decorated(schema: type[T]) -> type[T]:
        own = schema.model_fields
        more: dict[str, Any] = {
            name: (instead.get(name, hint), default) for name, hint in hints.items() if name not in own
        }
        module, text = schema.__module__, schema.__doc__
        return create_model(schema.__name__, __base__=schema, __module__=module, __doc__=text, **more)

    return decorated
