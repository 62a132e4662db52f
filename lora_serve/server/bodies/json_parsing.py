"""JSON as this server takes it: strict, and its mistakes told in words."""

from __future__ import annotations

import json
import math
from typing import Any

from lora_serve.core.errors import InvalidRequestError


def parse_json(raw: bytes) -> Any:
    """Strict JSON: UTF-8, finite numbers, no lone surrogates, no depth that Python cannot follow.

    Nothing else runs in Python meanwhile: at most a slice of `sliced_json.py` at a time.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise too_deep() from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The request body is not UTF-8.") from None
    except UnicodeEncodeError:
        raise InvalidRequestError("The request body holds half of a surrogate pair, which is no character.") from None
    except json.JSONDecodeError as error:
        raise no_json(str(error)) from None
    except ValueError as error:
        is_too_long = "int_max_str_digits" in str(error)  # Python's own words, to programmers
        raise no_json("a number has too many digits" if is_too_long else str(error)) from None
    return value


def no_json(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is not valid JSON: {reason[:200]}")


def too_deep() -> InvalidRequestError:
    return InvalidRequestError("The request body is nested too deeply.")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:32]} is too large a number")
    return number
