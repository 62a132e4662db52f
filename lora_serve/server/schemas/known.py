"""Which fields of a body mean something: those of the schemas."""

from __future__ import annotations

import functools

from lora_serve.server.schemas.fields import Fields
from lora_serve.server.schemas.markers import Ignored, standing

TOKEN_ID_NAMES = frozenset(
    ("prompt", "input", "tokens", "token_ids")
)  # fields that may hold as many integers as a body can


@functools.cache
def known_names() -> frozenset[str]:
    """The names of all fields that some route reads; others are ignored. Call it once every schema is imported."""
    return frozenset[str]().union(*map(_read_names, _below(Fields)))


def _read_names(schema: type[Fields]) -> list[str]:
    return [name for name, field in schema.model_fields.items() if not isinstance(standing(field), Ignored)]


def _below(schema: type[Fields]) -> list[type[Fields]]:
    return [schema, *(found for child in schema.__subclasses__() for found in _below(child))]
