"""Around every handler: request id, errors in OpenAI's form, access log."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from lora_serve.core.errors import CapacityError, RateLimitedError, WrongKeysError
from lora_serve.core.log_context import logged_with
from lora_serve.server.answers.errors import CLIENT_LEFT, wire_error
from lora_serve.server.context import CONTEXT, RequestContext
from lora_serve.server.guards import audited
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.route import ROUTES, Route
from lora_serve.server.services import SERVICES

PROBED = web.AppKey("probed", dict[str, int])  # the last status that each probe was answered
MAX_ID_LENGTH = 128  # of a client's own
access_log = logging.getLogger("lora_serve.access")


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn errors into answers, and write one line of log."""
    context = request[CONTEXT] = RequestContext(client_request_id=_named_by_client(request))
    status = CLIENT_LEFT
    route: Route | None = None
    with logged_with(context.log_fields):
        try:
            route = request.app[ROUTES].find(request)
            answered = _respond(request, handler, context, route)
            if route is not None and route.is_act:
                answered = audited(request, route, context, answered)
            response = await answered
            status = response.status
            if request.app[SERVICES].lifecycle.state is ServerState.DRAINING:
                response.force_close()  # a client that kept its connection would send the next request into its end
            return response
        finally:
            _log(request, context, route, status)


def _named_by_client(request: web.Request) -> str:
    """The request's `X-Request-Id`; empty: none, or one that is not printable, or too long."""
    name = request.headers.get("X-Request-Id", "")
    return name if name.isascii() and name.isprintable() and len(name) <= MAX_ID_LENGTH else ""


async def _respond(
    request: web.Request, handler: Handler, context: RequestContext, route: Route | None
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response(status=CLIENT_LEFT)  # nobody reads it, and aiohttp logs no traceback
        if isinstance(error, RateLimitedError):
            context.rate_limits = error.standings
            context.is_noise = isinstance(error, WrongKeysError)
        if isinstance(error, CapacityError):
            request.app[SERVICES].metrics.count_refusal(error.reason)
        refused = wire_error(error, context.request_id)
        form = None if route is None else route.refusal
        return refused.response(None if form is None else form(refused, context.request_id))


def _is_repeated(request: web.Request, route: Route | None, status: int) -> bool:
    """True for a probe that was answered the same before; a server's first probe finds it well, or it is news."""
    if route is None or not route.is_probe:
        return False
    probed = request.app[PROBED]
    before, probed[route.path] = probed.get(route.path, HTTPStatus.OK), status
    return status == before


def _log(request: web.Request, context: RequestContext, route: Route | None, status: int) -> None:
    """No query string, no body, no header: they may hold what is not ours to keep."""
    is_quiet = _is_repeated(request, route, status) or context.is_noise
    milliseconds = (time.monotonic() - context.started) * 1000
    path = request.rel_url.raw_path  # percent-encoded, so no line break can get in
    access_log.log(
        logging.DEBUG if is_quiet else logging.INFO,
        "%s %s %d %.1f ms",
        request.method,
        path,
        status,
        milliseconds,
        extra={
            **context.log_fields(),
            "method": request.method,
            "path": path,
            "status": status,
            "duration_ms": round(milliseconds, 1),
            "prompt_tokens": context.num_prompt_tokens,
            "output_tokens": context.num_output_tokens,
        },
    )
