"""JSON without Python's leniencies: no duplicate keys, no NaN or Infinity, no lone surrogates; one error type."""

from __future__ import annotations

import json
from typing import Any

from lora_serve.core.errors import InvalidAdapterError


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises InvalidAdapterError, which calls the text `what`."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError([f"{what} is not valid JSON: {_reason(error)}"]) from None
    if not isinstance(value, dict):
        raise InvalidAdapterError([f"{what} is not a JSON object"])
    return value


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
