"""Marks of fields that nothing here serves; they stand in the schemas, so that every list has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, so that a request with it is refused: all values but `harmless` are.

    `why` is said to the caller: it begins with a verb or a noun and says what to do instead.
    """

    why: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"refused: {self.why}"}

    def check(self, value: Any) -> Any:
        """Raises ValueError."""
        if any(value == item and type(value) is type(item) for item in self.harmless):
            return value
        raise ValueError(self.why)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that does not change what the caller gets; `why` says why not."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"ignored: {self.why}"}


def standing(field: Any) -> Refused | Ignored | None:
    """The mark of a model's field; None: it works."""
    found = [mark for mark in field.metadata if isinstance(mark, Refused | Ignored)]
    return found[0] if found else None


def marked(fields: Mapping[str, Any]) -> dict[str, Refused | Ignored]:
    """The fields of a model that bear a mark, by name."""
    return {name: mark for name, field in fields.items() if (mark := standing(field)) is not None}
