"""Which fields of a body mean something: those of the schemas, and those that are refused as they are not there yet."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import Fields
from lora_serve.server.schemas.markers import Ignored, standing

LATER_NAMES = frozenset(("chat_template",))
TOKEN_ID_NAMES = frozenset(("prompt", "input", "tokens"))  # fields that may hold as many integers as a body can


def refuse_later(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if `fields` ask for a template."""
    if fields.get("chat_template"):
        message = "`chat_template` is not accepted: the base model's own template is always used."
        raise InvalidRequestError(message, param="chat_template")


@functools.cache
def known_names() -> frozenset[str]:
    """The names of all fields that some route reads; others are ignored. Call it once every schema is imported."""
    return LATER_NAMES.union(*map(_read_names, _below(Fields)))


def _read_names(schema: type[Fields]) -> list[str]:
    return [name for name, field in schema.model_fields.items() if not isinstance(standing(field), Ignored)]


def _below(schema: type[Fields]) -> list[type[Fields]]:
    return [schema, *(found for child in schema.__subclasses__() for found in _below(child))]
