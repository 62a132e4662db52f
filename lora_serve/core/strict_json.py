"""JSON as it is taken from users, in bodies and in files: without the leniencies of Python's own reader."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import msgspec

from lora_serve.core.errors import InvalidAdapterError


class JsonError(ValueError):
    """The text is not JSON as it is taken here. `reason` says why in a few words, `str(error)` as a predicate."""

    def __init__(self, reason: str, predicate: str = "") -> None:
        self.reason = reason[:200]
        super().__init__(predicate or f"is not valid JSON: {self.reason}")


def parse_json(text: bytes, *, unique_keys: bool = False, max_depth: int | None = None) -> Any:
    """The value of UTF-8 text with finite numbers only, no half of a surrogate pair and no depth that Python cannot
    follow. `unique_keys`: an object's key must not occur twice (else the last one counts). `max_depth`: of values
    inside one another, the outermost and the innermost counted. The caller bounds the size. Raises JsonError.
    """
    if not unique_keys and max_depth is None:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(text)  # 8 times as fast, and as strict; what it refuses gets its words below
    hook = _unique if unique_keys else None
    try:
        value = json.loads(
            text.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=hook
        )
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise JsonError("nested too deeply", "is nested too deeply.") from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8", "is not UTF-8.") from None
    except UnicodeEncodeError:
        what = "half of a surrogate pair, which is no character"
        raise JsonError(what, f"holds {what}.") from None
    except JsonError:
        raise
    except ValueError as error:
        is_too_long = "int_max_str_digits" in str(error)  # Python's own words, to programmers
        raise JsonError("a number has too many digits" if is_too_long else str(error)) from None
    if max_depth is not None and depth_of(value) > max_depth:
        raise JsonError(f"nested more than {max_depth} deep")
    return value


def parse_object(text: bytes, what: str, max_depth: int | None = None) -> dict[str, Any]:
    """The JSON object in a file of an adapter, `what` in the errors. Raises InvalidAdapterError."""
    try:
        value = parse_json(text, unique_keys=True, max_depth=max_depth)
    except JsonError as error:
        raise InvalidAdapterError([f"{what} is not valid JSON: {error.reason}"]) from None
    if not isinstance(value, dict):
        raise InvalidAdapterError([f"{what} is not a JSON object"])
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise JsonError("a key occurs twice")
    return table


def _refuse_constant(name: str) -> float:
    raise JsonError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError(f"{text[:32]} is too large a number")
    return number


def depth_of(value: Any) -> int:
    """Values inside one another at most, the outermost and the innermost counted."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for children in inner for child in children]
    return depth
