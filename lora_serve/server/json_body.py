"""A request's body, or query, as a checked value; a mistake in it is a 4xx that says what is wrong.

A body is counted, held against its digests and decoded while it comes; aiohttp's own decoder is turned off
(sockets/connections.py), as it does not ask whether a gzip stream ever ended. However large a body is, the event loop
is never held up by it for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lora_serve.adapters.http_content import CONTENT_DIGEST, Decoder, ExpectedDigests, decoder_for
from lora_serve.core import strict_json
from lora_serve.core.errors import InvalidRequestError, PayloadTooLargeError, SlowRequestError, UnsupportedMediaError
from lora_serve.core.setting_groups.http import RequestLimits
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_parsing import fields_of
from lora_serve.server.services import SERVICES

CHUNK_BYTES = 2**18
MAX_SMALL = 2**16  # bytes of a body that is never counted
MAX_LIGHT = 2**21  # bytes of one that may be parsed on the event loop: a chat of 1 MiB takes 1 ms
MAX_PARTS = 2**16  # values of such a one at most: so many take 15 ms
_CODED_BYTES = 2**16  # read at once of a coded body: gzip's members without content take the longest to decode
_MAX_LINE = 2**16
_MAX_LINES = 2**12  # the multipart reader takes preamble, boundaries and headers in lines, and no part's content


class BodyStream:
    """The stream that aiohttp's multipart reader asks for, over a body that aiohttp would not check."""

    def __init__(self, request: web.Request, on_bytes: Callable[[int], None]) -> None:
        """`on_bytes`: called with the number of bytes so far, as sent or decoded, whichever are more; may raise to
        break the reading off.

        Raises InvalidRequestError, UnsupportedMediaError for headers that cannot be understood.
        """
        self._source = request.content
        self._digests = _digests_of(request)
        self._decoder = decoder_of(request)
        self._chunk_bytes = _CODED_BYTES if "Content-Encoding" in request.headers else CHUNK_BYTES
        self._on_bytes = on_bytes
        self._num_sent = self._num_decoded = self._num_lines = 0
        self._pieces: Iterator[bytes] = iter(())
        self._buffer = bytearray()
        self._is_over = False

    async def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises InvalidRequestError if the body does not fit its digests."""
        if not self._buffer:
            await self._fill()
        return self._taken(size)

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """The bytes up to the next line feed, or to the end. Raises what `read` does, LineTooLong, and
        InvalidRequestError for more lines than the parts of any upload need.
        """
        self._num_lines += 1
        if self._num_lines > _MAX_LINES:
            raise InvalidRequestError(
                f"More than {_MAX_LINES} lines of the multipart body are outside its parts' content."
            )
        most, looked = max_line_length or _MAX_LINE, 0
        while (at := self._buffer.find(b"\n", looked)) < 0 and not self._is_over and len(self._buffer) <= most:
            looked = len(self._buffer)
            await self._fill()
        size = at + 1 if at >= 0 else len(self._buffer)
        if size > most:
            raise LineTooLong(bytes(self._buffer[:100]), most)
        return self._taken(size)

    def unread_data(self, data: bytes) -> None:
        """Put `data` back, to come again at the next read."""
        self._buffer[:0] = data

    def at_eof(self) -> bool:
        """True if the end was met, and nothing is left before it."""
        return self._is_over and not self._buffer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of the body, piece by piece."""
        while chunk := await self.read(CHUNK_BYTES):
            yield chunk

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _fill(self) -> None:
        """Add the next piece; at the body's end, hold all of it against its digests and checksum."""
        piece = self._next_piece()
        if piece:
            await asyncio.sleep(0)  # few bytes may decode to many pieces, and nothing was waited for
        while not piece and not self._is_over:
            chunk = await self._source.read(self._chunk_bytes)
            self._is_over = not chunk
            self._num_sent += len(chunk)
            self._digests.update(chunk)
            self._pieces = self._decoder.decode(chunk) if chunk else iter(())
            piece = self._next_piece()
            if not piece and not self._is_over:
                await asyncio.sleep(0)  # the next chunk may be here already, and be as empty
        self._buffer += piece
        if self._is_over:
            self._digests.check()
            self._decoder.finish()

    def _next_piece(self) -> bytes:
        piece = next(self._pieces, b"")
        self._num_decoded += len(piece)
        self._on_bytes(max(self._num_sent, self._num_decoded))
        return piece


def decoder_of(request: web.Request) -> Decoder:
    """The decoder for the request's Content-Encoding. Raises UnsupportedMediaError."""
    return decoder_for(", ".join(request.headers.getall("Content-Encoding", [])), "The request body")


def _digests_of(request: web.Request) -> ExpectedDigests:
    fields = request.headers.getall(CONTENT_DIGEST, [])
    return ExpectedDigests(", ".join(fields) if fields else None)


M = TypeVar("M", bound=BaseModel)


async def read_json(request: web.Request, *, keep_null: bool = False) -> dict[str, Any]:
    """The body as a JSON object, without fields that are null unless `keep_null`.

    Raises InvalidRequestError, PayloadTooLargeError, SlowRequestError, UnsupportedMediaError; CapacityError if there is
    no memory for a large one; AuthenticationError if the caller's key was revoked while the body came.
    """
    _check_headers(request)
    with ExitStack() as memory:  # a large body holds some until it is parsed
        raw = await _receive(request, memory)
        request[CONTEXT].enter_again()
        value = await _parse(request, raw)
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    return {name: item for name, item in value.items() if keep_null or item is not None}


def parse_json(raw: bytes, param: str | None = None) -> Any:
    """The value of a body, or of its field `param`. Raises InvalidRequestError."""
    try:
        return strict_json.parse_json(raw)
    except strict_json.JsonError as error:
        raise InvalidRequestError(f"{f'`{param}`' if param else 'The request body'} {error}", param=param) from None


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


async def _receive(request: web.Request, memory: ExitStack) -> bytes:
    """All of the body, decoded. Raises what `read_json` raises."""
    config = request.app[SERVICES].config
    try:
        async with asyncio.timeout(config.body_timeout):
            return await _read_bytes(request, config.max_body_size, memory)
    except TimeoutError:
        message = f"The request body did not arrive within {config.body_timeout:g} s (--body-timeout)."
        raise SlowRequestError(message) from None
    except (web.RequestPayloadError, ValueError) as error:
        raise InvalidRequestError("The request body cannot be read; it is cut short or badly encoded.") from error


async def _read_bytes(request: web.Request, max_bytes: int, memory: ExitStack) -> bytes:
    """All of the body, decoded and held against its digests. `memory`: where a large body's is counted until it is
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
            grow = grow or memory.enter_context(_memory_for(request))
            grow(num_bytes)

    async for piece in BodyStream(request, check).chunks():
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


def _memory_for(request: web.Request) -> AbstractContextManager[Callable[[int], None]]:
    caller = request[CONTEXT].caller
    return request.app[SERVICES].large_bodies.memory_for("" if caller is None else caller.tenant)


async def _parse(request: web.Request, raw: bytes) -> Any:
    """The value of a body; of one that takes long to parse, without the fields that no route knows."""
    return parse_json(raw) if _is_light(raw) else await request.app[SERVICES].large_bodies.parse(raw, fields_of)


def _is_light(raw: bytes) -> bool:
    """True for a body that does not block others if the event loop parses it."""
    return len(raw) <= MAX_SMALL or (len(raw) <= MAX_LIGHT and sum(map(raw.count, (b",", b"[", b"{"))) < MAX_PARTS)


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
