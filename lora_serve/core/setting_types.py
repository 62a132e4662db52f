"""How single settings are written: sizes in bytes, lists, NAME=NUMBER."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from lora_serve.core.setting_texts import check_text

YEAR = 31_536_000  # seconds: the most of any time, which timers and clocks can all count
MAX_COUNT = 2**31 - 1  # of what is counted only, and takes no memory by itself
MAX_BYTES = 2**50  # more than any machine has
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: Any) -> Any:
    """`"512MiB"`, `"2GB"`, `"1.5g"` or a plain number -> bytes (int). Anything else raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", value.lower())
    if not match:
        raise ValueError("expected a number of bytes such as 1073741824, 512MiB or 2GB")
    return int(min(float(match[1]) * _UNITS[match[2]], 2.0 * MAX_BYTES))


def parse_list(value: Any) -> Any:
    """An environment variable's text -> list: JSON's `["a", "b"]` or `a,b`. Anything else is left alone."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return check_text(json.loads(value))
        except (json.JSONDecodeError, RecursionError):
            raise ValueError("expected a JSON list of texts, or texts with commas between them") from None
    return [item.strip() for item in value.split(",") if item.strip()]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=MAX_BYTES)]
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(parse_list)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]


def parse_weights(value: Any) -> Any:
    """["a=2", "b=0.5"] or one text of them -> (("a", 2.0), ("b", 0.5)). Anything else raises ValueError."""
    items = parse_list(value)
    if not isinstance(items, list | tuple):
        raise ValueError("expected a list of TENANT=NUMBER")
    return tuple(_parse_weight(item) for item in items)


_LIGHTEST, _HEAVIEST = 1e-6, 1e6


def _parse_weight(item: Any) -> tuple[str, float]:
    name, equals, number = item.partition("=") if isinstance(item, str) else ("", "", "")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not (name and equals and _LIGHTEST <= weight <= _HEAVIEST):
        raise ValueError(f"expected TENANT=NUMBER with a number from {_LIGHTEST:g} to {_HEAVIEST:g}, not {item!r:.200}")
    return name, weight


TenantWeights = Annotated[tuple[tuple[str, float], ...], NoDecode, BeforeValidator(parse_weights)]
