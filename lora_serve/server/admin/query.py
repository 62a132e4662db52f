"""What lists are asked with."""

from __future__ import annotations

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


def limit_in(request: web.Request) -> int:
    """?limit= ; raises InvalidRequestError."""
    text = request.query.get("limit")
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequestError(f"`limit` must be a number from 1 to {MAX_LIMIT}.", param="limit")
    return int(text)
