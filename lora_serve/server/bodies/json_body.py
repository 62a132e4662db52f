"""A request's body, or query, as a checked value; a mistake in it is a 4xx that says what is wrong.

However large a body is, the event loop is never held up by it for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lora_serve.core.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnsupportedMediaError,
)
from lora_serve.core.setting_groups.http import RequestLimits
from lora_serve.server.bodies.body_stream import BodyStream, decoder_of
from lora_serve.server.bodies.json_parsing import parse_json
from lora_serve.server.bodies.sliced_json import SlicedObject
from lora_serve.server.context import CONTEXT
from lora_serve.server.large_bodies import MAX_SMALL
from lora_serve.server.schemas.known import TOKEN_ID_NAMES, known_names
from lora_serve.server.services import SERVICES

M = TypeVar("M", bound=BaseModel)


async def read_json(request: web.Request, *, keep_null: bool = False) -> dict[str, Any]:
    """The body as a JSON object, without fields that are null unless `keep_null`.

    Raises InvalidRequestError, PayloadTooLargeError, SlowRequestError, UnsupportedMediaError; CapacityError if there is
    no room for a large one; AuthenticationError if the caller's key was revoked while the body came.
    """
    _check_headers(request)
    with ExitStack() as room:  # a large body takes it until it is parsed
        raw = await _receive(request, room)
        request[CONTEXT].enter_again()
        value = await _parse(request, raw)
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    return {name: item for name, item in value.items() if keep_null or item is not None}


def check_query(model: type[M], request: web.Request) -> M:
    """The query as a `model`. Raises InvalidRequestError."""
    return check_fields(model, read_query(request))


def read_query(request: web.Request) -> dict[str, str]:
    """The query's values by name. Raises InvalidRequestError for a name that occurs twice."""
    found: dict[str, str] = {}
    for name, text in request.query.items():
        if name in found:
            raise InvalidRequestError(f"`{name[:100]}` stands more than once behind the `?`.", param=name[:100])
        found[name] = text
    return found


def check_fields(model: type[M], fields: dict[str, Any], limits: RequestLimits | None = None) -> M:
    """`fields` as a `model`, within `limits` (None: the defaults). Raises InvalidRequestError for a wrong field."""
    try:
        return model.model_validate(fields, context=limits)
    except ValidationError as error:
        item = error.errors(include_url=False, include_context=False)[0]
        where = _where(item)
        message = item["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"`{where}`: {message}" if where else message, param=where or None) from None


async def _receive(request: web.Request, room: ExitStack) -> bytes:
    """All of the body, decoded. Raises what `read_json` raises."""
    config = request.app[SERVICES].config
    try:
        async with asyncio.timeout(config.body_timeout):
            return await _read_bytes(request, config.max_body_size, room)
    except TimeoutError:
        message = f"The request body did not arrive within {config.body_timeout:g} s (--body-timeout)."
        raise SlowRequestError(message) from None
    except (web.RequestPayloadError, ValueError) as error:
        raise InvalidRequestError("The request body cannot be read; it is cut short or badly encoded.") from error


async def _read_bytes(request: web.Request, max_bytes: int, room: ExitStack) -> bytes:
    """All of the body, decoded and held against its digests. `room`: where a large body's memory is counted until it is
    closed. Raises PayloadTooLargeError, InvalidRequestError, CapacityError.

    aiohttp's own `read` goes on for as long as there are bytes, without a turn for other tasks.
    """
    pieces = list[bytes]()
    grow: Callable[[int], None] | None = None

    def check(num_bytes: int) -> None:
        nonlocal grow
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if num_bytes > MAX_SMALL:
            grow = grow or room.enter_context(_room_for(request))
            grow(num_bytes)

    async for piece in BodyStream(request, check).chunks():
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


def _room_for(request: web.Request) -> AbstractContextManager[Callable[[int], None]]:
    caller = request[CONTEXT].caller
    return request.app[SERVICES].large_bodies.room("" if caller is None else caller.tenant)


async def _parse(request: web.Request, raw: bytes) -> Any:
    """The value of a body. A large one is read on a thread, without the fields that no route knows."""
    if len(raw) <= MAX_SMALL:
        return parse_json(raw)
    reader = SlicedObject(raw, known_names(), TOKEN_ID_NAMES)
    async with request.app[SERVICES].large_bodies.parsing:
        try:
            return await asyncio.to_thread(reader.read)
        finally:
            reader.stop()


def _check_headers(request: web.Request) -> None:
    kind = request.content_type.lower()
    # Without any a key is asked for, which no page can make a browser add; else a page could leave the type out.
    may_say_nothing = request.app[SERVICES].authenticator.required and "Content-Type" not in request.headers
    if not may_say_nothing and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaError("The request body must be JSON: send `Content-Type: application/json`.")
    decoder_of(request)
    max_bytes = request.app[SERVICES].config.max_body_size
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes} bytes (--max-body-size).")


def _where(item: ErrorDetails) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    path = ""
    for part in item["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
