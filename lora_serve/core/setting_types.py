"""The types of single settings (bytes, lists, NAME=NUMBER), and the base class of every group of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from lora_serve.core.setting_texts import MAX_BYTES, check_text, parse_bytes
from lora_serve.core.strict_json import JsonError, parse_json

YEAR = 31_536_000  # seconds: the most of any time, which timers and clocks can all count
MAX_COUNT = 2**31 - 1  # of what is counted only, and takes no memory by itself


def parse_list(value: Any) -> Any:
    """An environment variable's text -> list: JSON's `["a", "b"]` or `a,b`. Anything else is left alone."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return check_text(parse_json(value.encode()))
        except JsonError:
            raise ValueError("expected a JSON list of texts, or texts with commas between them") from None
    return [item.strip() for item in value.split(",") if item.strip()]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=MAX_BYTES)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(parse_list)]
Texts = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


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


TenantWeights = Annotated[tuple[tuple[str, float], ...], BeforeValidator(parse_weights)]


class SettingsGroup(BaseModel):
    """Some of the fields of `Settings`, named like their flags with underscores and described for --help."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Runs before a value is understood as a number, a path or one of some words."""
        return check_text(value)
