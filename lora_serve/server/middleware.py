"""Around every handler: request id, access log, errors in OpenAI's form, the line in the audit log, and who may enter.

An admin act is a changing request to an admin route by a caller whose key is known, even if it is refused. Attempts
without a known key are in the access log only, so that the disk cannot be filled from outside.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from structlog.contextvars import bound_contextvars

from lora_serve.adapters.catalog.catalog import own_name
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import split_name
from lora_serve.core.errors import (
    AdapterUnavailableError,
    AuthenticationError,
    CapacityError,
    InvalidRequestError,
    RateLimitedError,
    WrongKeyError,
    WrongKeysError,
)
from lora_serve.core.request import Task
from lora_serve.core.tenant import Caller
from lora_serve.server.answers import CLIENT_LEFT, wire_error
from lora_serve.server.context import CONTEXT, AuditNote, RequestContext
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.route import ROUTES, Access, Route
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.authenticator import Authenticator, WrongKeys
from lora_serve.tenancy.directory_state import without_secrets

Authenticate = Callable[[Authenticator, str | None], Caller]
WRONG_KEYS = web.AppKey("wrong_keys", WrongKeys)
_AUTHENTICATE: Mapping[Access, Authenticate] = {
    Access.ANY_KEY: Authenticator.authenticate,
    Access.MODELS: Authenticator.inference,
    Access.INFERENCE: Authenticator.inference,
    Access.TENANT_ADMIN: Authenticator.managing,
    Access.ADMIN: Authenticator.admin,
}
PROBED = web.AppKey("probed", dict[str, int])  # the last status that each probe was answered
MAX_ID_LENGTH = 128  # of a client's own
access_log = logging.getLogger("lora_serve.access")
logger = logging.getLogger(__name__)
_MAX_SUBJECT = 300
_UNAVAILABLE = 503


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn errors into answers, and write one line of log."""
    context = request[CONTEXT] = RequestContext(client_request_id=_named_by_client(request))
    status = CLIENT_LEFT
    route: Route | None = None
    with bound_contextvars(log_fields=context.log_fields):
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
    """True for a probe that was answered the same before; a server's first probe finds it well, or it is logged."""
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


def authenticated(request: web.Request, authenticate: Authenticate) -> Caller:
    """The caller whose key the request has; Anthropic's clients send theirs in a header of another name, Azure's in a
    third, and a proxy may add one that is not ours: the first right key counts. Raises what `authenticate` raises, and
    WrongKeysError if the address has sent too many wrong keys.

    The address is the connection's: a header that names another could be made up.
    """
    keys = (request.headers.get(name) for name in ("X-Api-Key", "Api-Key"))
    refusals = list[AuthenticationError]()
    for credentials in (request.headers.get("Authorization"), *(f"Bearer {key}" for key in keys if key)):
        try:
            return authenticate(request.app[SERVICES].authenticator, credentials)
        except AuthenticationError as error:
            refusals.append(error)
    for refusal in refusals:
        if isinstance(refusal, WrongKeyError):
            request.app[WRONG_KEYS].note(request.remote or "")
    raise refusals[-1]


def guarded(route: Route) -> Handler:
    """The route's handler, for the callers that the route lets in. The others are told why not: AuthenticationError,
    ForbiddenError, NotReadyError, CapacityError, or InvalidRequestError if the served model has another task.
    """
    if route.access is Access.PUBLIC:
        return route.handler
    around = _for_inference if route.access is Access.INFERENCE else _for_others

    async def guard(request: web.Request) -> web.StreamResponse:
        return await around(request, route)

    return guard


async def _for_inference(request: web.Request, route: Route) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = _enter(request, route.access)
    with services.lifecycle.inside():
        services.quotas.check(caller)
        if services.overflow is None or not services.overflow.may_take(request, caller.tenant):
            services.client.gate.check()  # before a body is read and a prompt tokenised for nothing
        _check_task(request, route.tasks)
        return await route.handler(request)


async def _for_others(request: web.Request, route: Route) -> web.StreamResponse:
    """The handler of an admin route looks itself at whose adapters and keys a call is about."""
    if route.access is not Access.MODELS:
        _enter(request, Access.ANY_KEY)  # whose act it is, if it is refused
    caller = _enter(request, route.access)
    if route.is_act:
        services = request.app[SERVICES]
        await services.quotas.begin_act(caller, services.config.acts_of(caller.role))
        await services.check_store(route.is_deletion)  # one that takes no changes could not even keep the audit line
    return await route.handler(request)


def _enter(request: web.Request, access: Access) -> Caller:
    return request[CONTEXT].enter(lambda: authenticated(request, _AUTHENTICATE[access]))


def _check_task(request: web.Request, tasks: tuple[Task, ...]) -> None:
    task = request.app[SERVICES].spec.task
    if tasks and task not in tasks:
        wanted = " or ".join(f"--task {name}" for name in tasks)
        message = f"{request.path} needs a server started with {wanted}; this one runs its model with --task {task}."
        raise InvalidRequestError(message, param="model", code="wrong_task")


async def audited(
    request: web.Request, route: Route, context: RequestContext, answered: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """The answer, once an admin act is noted; 503 in its place if the act could not be noted."""
    services = request.app[SERVICES]
    before = services.catalog.snapshot
    try:
        response = await answered
    except asyncio.CancelledError:  # the act may go on without its caller
        services.background.start(_note(route, request, context, before, CLIENT_LEFT), "noting an act")
        raise
    try:
        await services.background.complete(_note(route, request, context, before, response.status), "noting an act")
    except AdapterUnavailableError as error:
        logger.error("%s answered %d and could not be noted: %s", request.path, response.status, error)
        if response.status == _UNAVAILABLE and services.store_problem is not None:
            return response  # refused for the same cause, which it states
        return wire_error(error, context.request_id).response()
    return response


async def _note(route: Route, request: web.Request, context: RequestContext, before: Snapshot, outcome: int) -> None:
    caller = context.caller
    if caller is not None:
        note = _completed(context.audit, request, caller, before)
        act = act_of(route, request, caller, note, outcome, context.request_id)
        await request.app[SERVICES].audit.append(act)


def _completed(note: AuditNote, request: web.Request, caller: Caller, before: Snapshot) -> AuditNote:
    """The note with the fields that the handler left open, from the URL and from the catalog before the act."""
    subject = note.subject or "/".join(request.match_info.values())
    own = own_name(caller.scope, subject) if caller.scope is not None else subject
    entry = before.entries.get(split_name(subject)[0]) or before.entries.get(split_name(own)[0])
    if entry is None or (caller.scope is not None and entry.tenant != caller.scope):
        owner = note.owner or request.match_info.get("tenant", "")
        is_own = caller.scope in (None, owner)  # an attempt on another tenant's adapter is not shown to that tenant
        return AuditNote(subject, owner if is_own else "", note.digest)
    return AuditNote(entry.name, note.owner or entry.tenant, note.digest or entry.default.digest)


def act_of(route: Route, request: web.Request, caller: Caller, note: AuditNote, outcome: int, request_id: str) -> Act:
    """The request in the log: its route, never its body or its query string's values beyond `version`."""
    subject = note.subject
    if version := request.query.get("version", ""):
        subject += f"@{version}"
    subject = without_secrets(subject)  # a caller may have put a whole key where its id belongs
    return Act(
        key=caller.key_id,
        tenant=caller.tenant,
        role=str(caller.role),
        action=f"{route.method} {route.path}",
        subject=subject[:_MAX_SUBJECT],
        owner=note.owner,
        digest=note.digest,
        outcome=outcome,
        request_id=request_id,
    )
