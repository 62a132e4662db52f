"""The guards before the handlers: who may call a route, and when; pages of other sites; and the audit line of each
admin act.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_args

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from lora_serve.adapters.catalog.catalog import own_name
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import split_name
from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    AuthenticationError,
    ForeignSiteError,
    InvalidRequestError,
    Unit,
    WrongKeyError,
)
from lora_serve.core.request import Task
from lora_serve.core.tenant import Caller
from lora_serve.core.web_origin import Host, Origin, parse_host, parse_name, parse_origin
from lora_serve.server.answers.errors import CLIENT_LEFT, wire_error
from lora_serve.server.context import CONTEXT, AuditNote, RequestContext
from lora_serve.server.route import ROUTES, Access, Route
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.audit.journal import Act
from lora_serve.tenancy.authentication.authenticator import Authenticator, WrongKeys, is_loopback
from lora_serve.tenancy.directory.state import without_secrets

Authenticate = Callable[[Authenticator, str | None], Caller]

WRONG_KEYS = web.AppKey("wrong_keys", WrongKeys)
_AUTHENTICATE: Mapping[Access, Authenticate] = {
    Access.ANY_KEY: Authenticator.anybody,
    Access.MODELS: Authenticator.inference,
    Access.INFERENCE: Authenticator.inference,
    Access.TENANT_ADMIN: Authenticator.managing,
    Access.ADMIN: Authenticator.admin,
}
logger = logging.getLogger(__name__)
_MAX_SUBJECT = 300
_UNAVAILABLE = 503
_ITS_OWN = frozenset(("same-origin", "none"))  # `Sec-Fetch-Site`; none: typed, or a bookmark
_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
_READABLE = (
    "Retry-After, Server-Timing, X-Request-Id, X-Adapter-Id, X-Adapter-Version, X-Adapter-Digest, X-Adapter-Scale, "
    "X-Adapter-Active, X-Adapter-Fallback, X-Served-By, X-Replica-Id"
)
_LIMITS = tuple(f"x-ratelimit-{figure}-{unit}" for unit in get_args(Unit) for figure in ("limit", "remaining", "reset"))
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:, ?[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_FOREIGN = "This server asks for no key, so pages of other sites may not use it."
_REMEMBERED = "600"  # seconds for which a browser need not ask again whether it may ask


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
    """The answer, once an admin act is in the audit log, durable; 503 in its place if the act could not be noted.

    An act is a changing request to an admin route by a caller whose key is known, even if it is refused. Attempts
    without a known key are in the access log only, so that the disk cannot be filled from outside.
    """
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


class BrowserGuard:
    """Keeps web pages of other sites away from a server that asks for no key, before a body is read.

    Such a server trusts all that reaches it, and a browser on the same machine does: any page it shows can send a
    "simple" request (a form, a fetch() of plain text) that the browser lets out without asking, or be served under a
    name that is made to mean 127.0.0.1 (DNS rebinding). Such requests are known by `Origin` and `Sec-Fetch-Site`, which
    no page can write, and by `Host`. No browser adds a key by itself, so a server that asks for one needs no guard.

    Pages that --allowed-origins names may use any server, and read its answers (CORS: https://fetch.spec.whatwg.org).
    """

    def __init__(self, config: ServerConfig, *, asks_for_key: bool) -> None:
        self._rules = config
        self._asks_for_key = asks_for_key
        self._is_local = is_loopback(config.host)
        self._names = {"localhost", *config.hosts}
        if own := parse_name(config.host):
            self._names.add(own)

    @property
    def middleware(self) -> Middleware:
        """Raises ForeignSiteError in place of the handler; answers a named origin's question whether it may ask."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._asks_for_key:
                self._check_host(request)
            if self._is_from_named_origin(request):
                return _permission(request) if _is_preflight(request) else await handler(request)
            if not self._asks_for_key:
                _check_site(request)
            return await handler(request)

        return guard

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called by aiohttp just before an answer's headers are sent: pages of named origins may read it."""
        if not self._rules.origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._is_from_named_origin(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join((_READABLE, *_LIMITS))

    def _is_from_named_origin(self, request: web.Request) -> bool:
        origins = request.headers.getall(hdrs.ORIGIN, ())
        return len(origins) == 1 and parse_origin(origins[0]) in self._rules.origins

    def _check_host(self, request: web.Request) -> None:
        """A client so old that it names no host is no browser. A request for a whole URL names two hosts."""
        if (text := request.headers.get(hdrs.HOST)) is None:
            return
        for said in (text, request.host):
            host = parse_host(said)
            if host is None or not self._is_own(host):
                raise ForeignSiteError(_host_text(said, host))

    def _is_own(self, host: Host) -> bool:
        """True for the server's own names, and for addresses: no name can be made to look like one."""
        if host.name in self._names or host.name.endswith(".localhost"):
            return True
        address = host.address
        return address is not None and (address.is_loopback or not self._is_local)


def _check_site(request: web.Request) -> None:
    host = parse_host(request.headers.get(hdrs.HOST, ""))
    own = Origin.of("https" if request.secure else "http", host) if host else None
    for text in request.headers.getall(hdrs.ORIGIN, ()):
        if own is None or parse_origin(text) != own:
            raise ForeignSiteError(_origin_text(text))
    for site in request.headers.getall("Sec-Fetch-Site", ()):
        if site not in _ITS_OWN and not _is_followed_link(request):
            raise ForeignSiteError(_site_text(site))


def _is_followed_link(request: web.Request) -> bool:
    """True if the answer is shown to a person as a page of its own, which the page with the link cannot read."""
    route = request.app[ROUTES].find(request) if request.method == hdrs.METH_GET else None
    is_page = route is not None and route.is_page
    shown = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest"))
    return is_page and shown == ("navigate", "document")


def _is_preflight(request: web.Request) -> bool:
    return request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers


def _permission(request: web.Request) -> web.Response:
    """Permit all headers that are asked about: clients send many of their own, and none of them opens anything here."""
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: _REMEMBERED}
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    if _FIELD_NAMES.fullmatch(asked):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
    return web.Response(status=204, headers=headers)


def _host_text(said: str, host: Host | None) -> str:
    text = (
        "This server asks for no key, so it must not be called by names that are not its own: any web page could reach "
        f"it by one of those. The request is for the host `{said[:100]}`."
    )
    hint = f" If that is meant to be this server, start it with --allowed-hosts {host.name}." if host else ""
    return text + hint


def _origin_text(text: str) -> str:
    named = f"--allowed-origins {text[:200]}" if parse_origin(text) else "--allowed-origins and an origin of its own"
    return f"{_FOREIGN} The request's Origin is `{text[:200]}`; if that page may, start the server with {named}."


def _site_text(site: str) -> str:
    return (
        f"{_FOREIGN} The request's Sec-Fetch-Site is `{site[:100]}`; if that page may, start the server with "
        "--allowed-origins and the page's origin, and let it ask by fetch()."
    )
