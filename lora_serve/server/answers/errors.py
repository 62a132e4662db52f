"""The one place where an error becomes a status and OpenAI's error body."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from lora_serve.core import errors
from lora_serve.server.answers.json_answer import json_response

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
            return WireError(status, str(error), name, _param(error), code or _code(error), _headers(error), reasons)
    logger.error("request %s failed", request_id, exc_info=error)
    message = f"The server met an internal error. Its log has the details under the request id {request_id}."
    return WireError(500, message, "server_error", code="internal_error")


def _param(error: errors.LoraServeError) -> str | None:
    if isinstance(error, errors.AdapterNotFoundError):
        return "model"
    return error.param if isinstance(error, errors.InvalidRequestError) else None


def _code(error: errors.LoraServeError) -> str | None:
    return error.code if isinstance(error, errors.InvalidRequestError) else None


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
