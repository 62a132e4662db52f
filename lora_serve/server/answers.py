"""The one JSON writer of answers, and errors as statuses and OpenAI's error body."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from lora_serve.core import errors
from lora_serve.server.background.tasks import LONG

_GROUP = 8  # elements
_SINGLE = frozenset((int, float, bool, type(None)))
_HOLDERS = (dict, list, tuple)
_SMALL = 2_000  # values, or a 32nd of their characters, that are written at once
_TEXT_SLICE = 2**16  # characters
SEND_BYTES = 2**18  # bytes that are sent at once
# A text, or a number that msgspec spells in another way: 0.00001 and 1e-6 are 1e-05 and 1e-06.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|(?<![\d.])-?(?:0\.0000\d+|\d[\d.]*e-\d+)')
# An integer of more than 64 bits; half a character, or its escape.
_NOT_FOR_MSGSPEC = (OverflowError, UnicodeEncodeError, msgspec.DecodeError)
_NOT_PLAIN = re.compile(r"[^ -~]+")
Encode = Callable[[Any], bytes]
_encode = msgspec.json.Encoder(enc_hook=list).encode  # of iterators
logger = logging.getLogger(__name__)
CLIENT_LEFT = 499  # nginx's status for a client that closed the connection; only ever in logs
MAX_RETRY_AFTER = 120  # seconds
MAX_REASONS = 200  # that an answer lists
# Status, type and code (None: the error's own) of the first class that fits; of other errors: `wire_error`.
_TABLE: tuple[tuple[type[errors.LoraServeError], int, str, str | None], ...] = (
    (errors.InvalidRequestError, 400, "invalid_request_error", None),
    (errors.AuthenticationError, 401, "authentication_error", "invalid_api_key"),
    (errors.QuotaExceededError, 403, "permission_error", "quota_exceeded"),
    (errors.ForeignSiteError, 403, "permission_error", "foreign_site"),
    (errors.ForbiddenError, 403, "permission_error", "forbidden"),
    (errors.AdapterNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (errors.NotFoundError, 404, "invalid_request_error", "not_found"),
    (errors.ConflictError, 409, "conflict_error", "conflict"),
    (errors.SlowRequestError, 408, "invalid_request_error", "request_timeout"),
    (errors.PayloadTooLargeError, 413, "invalid_request_error", "payload_too_large"),
    (errors.UnsupportedMediaError, 415, "invalid_request_error", "unsupported_media_type"),
    (errors.InvalidAdapterError, 422, "invalid_adapter", "invalid_adapter"),
    (errors.QueueFullError, 503, "server_error", "overloaded"),
    (errors.TenantQueueFullError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.WrongKeysError, 429, "rate_limit_error", "invalid_api_key"),
    (errors.RateLimitedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.DeviceQuotaError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.NotReadyError, 503, "server_error", "not_ready"),
    (errors.EngineLostError, 503, "server_error", "engine_restarted"),
    (errors.NeighbourLostError, 503, "server_error", "neighbour_lost"),
    (errors.AdapterUnavailableError, 503, "server_error", "adapter_unavailable"),
    (errors.CapacityError, 503, "server_error", "overloaded"),
    (errors.RequestTimeoutError, 504, "timeout_error", "timeout"),
)


def compact(value: Any) -> bytes:
    """A value as JSON in UTF-8 without blanks. No number of the server's own is so large that it has an exponent; those
    of callers may be: see `as_given`.
    """
    try:
        return _respelled(_encode(value))
    except _NOT_FOR_MSGSPEC:
        return _by_python(value, (",", ":"))


def spaced(value: Any) -> bytes:
    """A value as JSON in ASCII, with blanks."""
    try:
        data = msgspec.json.format(_respelled(_encode(value)), indent=0)
    except _NOT_FOR_MSGSPEC:
        return _by_python(value, (", ", ": "))
    if data.isascii() and b"\x7f" not in data:
        return data
    return _NOT_PLAIN.sub(lambda found: json.dumps(found[0])[1:-1], data.decode()).encode()


def as_given(value: Any) -> Any:
    """A value from a caller's JSON, to be written as Python spells it."""
    if value is None or value == {}:
        return value
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return msgspec.Raw(text.encode())
    except UnicodeEncodeError:  # half a character, which a record of an earlier version may hold
        return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer with a body that is small."""
    body = spaced(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


def _respelled(data: bytes) -> bytes:
    return _TOKEN.sub(_as_python_does, data) if b"0.0000" in data or b"e-" in data else data


def _as_python_does(token: re.Match[bytes]) -> bytes:
    found = token[0]
    return found if found.startswith(b'"') else repr(float(found)).encode()


def _by_python(value: Any, separators: tuple[str, str]) -> bytes:
    return json.dumps(value, separators=separators, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    if isinstance(value, msgspec.Struct):
        return _members(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else list(value)


async def json_answer(request: web.Request, make: Callable[[], Any], length: int) -> web.StreamResponse:
    """Answer with the value that `make` returns; a large one is emptied while it is written, so nothing else may
    hold it. `length`: of the answer, in the units of LONG.
    """
    if length <= LONG:
        return json_response(make())
    pieces = await asyncio.to_thread(lambda: _pieces(written(make())))
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)  # a fast reader takes megabytes, and others would wait for the last of them
    await response.write_eof()
    return response


def written(value: Any, encode: Encode = spaced) -> Iterator[bytes]:
    """The value as JSON, part by part; lists and objects give up what is written."""
    if isinstance(value, str):
        yield from _text(value, encode)
    elif isinstance(value, msgspec.Raw) or _is_small(value):
        yield encode(value)
    elif isinstance(value, msgspec.Struct):
        yield from written(_members(value), encode)
    elif isinstance(value, dict):
        before = b"{"
        for name in list(value):
            yield b"%b%b: " % (before, encode(name))
            yield from written(value.pop(name), encode)
            before = b", "
        yield b"}"
    else:
        yield from _list(emptied(value) if isinstance(value, list) else iter(value), encode)


def emptied(value: list[Any]) -> Iterator[Any]:
    """The elements, each of which the list lets go as it is taken."""
    for index, item in enumerate(value):
        value[index] = None
        yield item


def _members(value: msgspec.Struct) -> dict[str, Any]:
    config = value.__struct_config__
    kind = {} if config.tag_field is None else {config.tag_field: config.tag}
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    given = ((name, getattr(value, field)) for name, field in names)
    return kind | {name: item for name, item in given if item is not msgspec.UNSET}


def _list(value: Iterator[Any], encode: Encode) -> Iterator[bytes]:
    before = b"["
    while group := list(itertools.islice(value, _GROUP)):
        if _is_small(group):
            yield before + encode(group)[1:-1]
            before = b", "
            continue
        while group:
            yield before
            yield from written(group.pop(0), encode)
            before = b", "
    yield b"]" if before == b", " else b"[]"


def _text(value: str, encode: Encode) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(value), _TEXT_SLICE):
        yield encode(value[start : start + _TEXT_SLICE])[1:-1]
    yield b'"'


def _is_small(value: Any) -> bool:
    left: list[Any] = [(value,)]
    weight = 0
    while left:  # only what holds others is put there: a page of cards has a hundred thousand values
        item = left.pop()
        if type(item) not in _HOLDERS:
            if isinstance(item, msgspec.Struct):
                item = [getattr(item, name) for name in item.__struct_fields__]
            if not isinstance(item, _HOLDERS):
                if isinstance(item, Iterator):
                    return False
                if isinstance(item, msgspec.Raw):
                    weight += len(bytes(item)) // 32
                continue
        if (weight := weight + 2 * len(item)) > _SMALL:
            return False
        for part in item.values() if isinstance(item, dict) else item:
            kind = type(part)
            if kind is str:
                weight += len(part) // 32
            elif kind not in _SINGLE:
                left.append(part)
    return weight <= _SMALL


def _pieces(parts: Iterator[bytes]) -> list[bytes]:
    """The parts joined into pieces that are worth a call each."""
    pieces, held, num_held = list[bytes](), list[bytes](), 0
    for part in parts:
        held.append(part)
        num_held += len(part)
        if num_held >= SEND_BYTES:
            pieces.append(b"".join(held))
            held, num_held = [], 0
    return [*pieces, b"".join(held)]


class ErrorFacts(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    reasons: list[str] | UnsetType = UNSET


class Error(Struct):
    """The body of a refusal."""

    error: ErrorFacts


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as it goes over the wire."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None
    reasons: Sequence[str] = ()  # each by itself, where there may be several

    def body(self) -> Error:
        reasons = list(self.reasons) or UNSET
        return Error(ErrorFacts(self.message, self.type, self.param, self.code, reasons))

    def response(self, body: Any = None) -> web.Response:
        """The answer; `body`: in another form than OpenAI's."""
        return json_response(self.body() if body is None else body, status=self.status, headers=self.headers)


def wire_error(error: Exception, request_id: str) -> WireError:
    """The answer to `error`. An unexpected one is logged with its traceback and shown as a fixed text."""
    if isinstance(error, web.HTTPException):
        return _http_exception(error)
    if (refusal := errors.overload(error)) is not None:
        logger.warning("request %s is refused, as there is no memory: %s", request_id, error)
        error = refusal
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            reasons = error.reasons[:MAX_REASONS] if isinstance(error, errors.InvalidAdapterError) else ()
            param, shown_code = "model" if kind is errors.AdapterNotFoundError else None, code
            if isinstance(error, errors.InvalidRequestError):
                param, shown_code = error.param, error.code
            return WireError(status, str(error), name, param, shown_code, _headers(error), reasons)
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"The server met an internal error. Its log has the details under the request id {request_id}."
    return WireError(500, message, "server_error", code="internal_error")


def _headers(error: errors.LoraServeError) -> dict[str, str] | None:
    if isinstance(error, errors.AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.CapacityError):
        headers = {"Retry-After": str(max(1, min(MAX_RETRY_AFTER, math.ceil(error.retry_after))))}
        return headers | (_rate_limits(error) if isinstance(error, errors.TenantQueueFullError) else {})
    return None


def _rate_limits(error: errors.TenantQueueFullError) -> dict[str, str]:
    """Headers in OpenAI's names for each limit that there is."""
    headers = {}
    for name, figures in (("requests", error.requests), ("tokens", error.tokens)):
        if figures is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(figures[0])
            headers[f"x-ratelimit-remaining-{name}"] = str(figures[1])
    return headers


def _http_exception(error: web.HTTPException) -> WireError:
    """aiohttp's own refusals: no such path, wrong method, body too large."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return WireError(413, "The request body is too large.", "invalid_request_error", code="payload_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method[:32]} is not allowed here; allowed: {allowed}."
        code = "method_not_allowed"
        return WireError(405, message, "invalid_request_error", code=code, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return WireError(404, "There is nothing at this URL.", "invalid_request_error", code="not_found")
    return WireError(error.status, error.reason, "invalid_request_error" if error.status < 500 else "server_error")
