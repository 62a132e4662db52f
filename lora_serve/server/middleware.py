"""Around every handler: request id, errors in OpenAI's form, access log; and who may enter."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from lora_serve.core.errors import CapacityError, RateLimitedError, WrongKeysError
from lora_serve.core.log_context import logged_with
from lora_serve.core.tenant import Caller
from lora_serve.server.answers.errors import wire_error
from lora_serve.server.context import CONTEXT, RequestContext
from lora_serve.server.guards.auditing import audited, may_be_act
from lora_serve.server.guards.authentication import Authenticate, authenticated
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authentication.authenticator import Authenticator

access_log = logging.getLogger("lora_serve.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROBES = frozenset(("/health", "/ready", "/ping", "/metrics"))  # asked every few seconds; logged only if refused
CLIENT_LEFT = 499  # nginx's status for a client that closed the connection; only ever in the log


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn errors into answers, and write one line of log."""
    context = request[CONTEXT] = RequestContext()
    status = CLIENT_LEFT
    with logged_with(context.log_fields):
        try:
            response = await audited(request, context, _respond(request, handler, context))
            status = response.status
            return response
        finally:
            _log(request, context, status)


async def _respond(request: web.Request, handler: Handler, context: RequestContext) -> web.StreamResponse:
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
        return wire_error(error, context.request_id).response()


def _log(request: web.Request, context: RequestContext, status: int) -> None:
    """No query string, no body, no header: they may hold what is not ours to keep."""
    is_quiet = context.is_noise or (request.path in PROBES and status < 400)
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


def for_inference(handler: Handler) -> Handler:
    """Let in whoever may use the models, while the server is ready and its queue is not full already."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        caller = _enter(request, Authenticator.inference)
        with services.lifecycle.inside():
            services.quotas.check(caller)
            services.client.gate.check()  # before a body is read and a prompt tokenised for nothing
            return await handler(request)

    return guarded


def for_reading(handler: Handler) -> Handler:
    """Let in whoever may use the models, whatever state the server is in."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        _enter(request, Authenticator.inference)
        return await handler(request)

    return guarded


def for_admin(handler: Handler) -> Handler:
    """Let in the admin only, whatever `--auth` says."""
    return _for_role(handler, Authenticator.admin)


def for_managing(handler: Handler) -> Handler:
    """Let in the admin and tenants' own admins; the handler looks at whose adapters and keys it is about."""
    return _for_role(handler, Authenticator.managing)


def for_anybody(handler: Handler) -> Handler:
    """Let in whoever has a key."""
    return _for_role(handler, Authenticator.anybody)


def _for_role(handler: Handler, authenticate: Authenticate) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        _enter(request, Authenticator.anybody)  # whose act it is, if it is refused
        caller = _enter(request, authenticate)
        if may_be_act(request):
            services = request.app[SERVICES]
            await services.quotas.begin_act(caller, services.config.attempts.acts_of(caller.role))
            await services.check_store()  # it could not even be noted
        return await handler(request)

    return guarded


def _enter(request: web.Request, authenticate: Authenticate) -> Caller:
    return request[CONTEXT].enter(lambda: authenticated(request, authenticate))
