"""The place in a schema that an error speaks of: `llguidance` says what is wrong, and not where."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lora_serve.text.grammars.schema import subschemas

MAX_SECONDS = 0.3  # for the search; the place found by then is shown
_DEFINITIONS = ("$defs", "definitions")


def faulty_place(schema: Mapping[str, Any], error: str, fault: Callable[[Mapping[str, Any]], str]) -> str:
    """JSON pointer of the innermost schema that has the same error by itself. `fault`: the error of a schema."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, inner, until = "#", schema, time.monotonic() + MAX_SECONDS
    while True:
        for pointer, child in subschemas(inner):
            if time.monotonic() > until:
                return place
            if isinstance(child, dict) and fault({**definitions, **child}) == error:
                place, inner = place + pointer, child
                break
        else:
            return place
