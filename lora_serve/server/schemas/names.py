"""The names of all fields that some route reads: what else a body holds is ignored, however much it is."""

from __future__ import annotations

import functools

from lora_serve.server.schemas.fields import Fields
from lora_serve.server.schemas.later import LATER_NAMES

TOKEN_ID_NAMES = frozenset(("prompt", "input", "tokens"))  # fields that may hold as many integers as a body can


@functools.cache
def known_names() -> frozenset[str]:
    """Asked for once every schema is imported: by then the routes are."""
    return LATER_NAMES.union(*(schema.model_fields for schema in _below(Fields)))


def _below(schema: type[Fields]) -> list[type[Fields]]:
    found = [schema]
    for child in schema.__subclasses__():
        found += _below(child)
    return found
