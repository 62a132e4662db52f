"""Strict JSON of request bodies, and its errors in words."""

from __future__ import annotations

from typing import Any

from lora_serve.core import strict_json
from lora_serve.core.errors import InvalidRequestError


def parse_json(raw: bytes) -> Any:
    """The value of a body, or of a slice of one. Raises InvalidRequestError.

    The GIL is held meanwhile, so the text should be no larger than a slice.
    """
    try:
        return strict_json.parse_json(raw)
    except strict_json.JsonError as error:
        raise InvalidRequestError(f"The request body {error}") from None


def no_json(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is not valid JSON: {reason[:200]}")


def too_deep() -> InvalidRequestError:
    return InvalidRequestError("The request body is nested too deeply.")
