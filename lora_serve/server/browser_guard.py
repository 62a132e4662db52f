"""Keeps web pages of other sites away from a server that asks for no key, before a body is read.

Such a server trusts all that reaches it, and a browser on the same machine does: any page it shows can send a "simple"
request (a form, a fetch() of plain text) that the browser lets out without asking, or be served under a name that is
made to mean 127.0.0.1 (DNS rebinding). Such requests are known by `Origin` and `Sec-Fetch-Site`, which no page can
write, and by `Host`. No browser adds a key by itself, so a server that asks for one needs no guard.

Pages that --allowed-origins names may use any server, and read its answers (CORS: https://fetch.spec.whatwg.org).
"""

from __future__ import annotations

import re
from typing import get_args

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ForeignSiteError, Unit
from lora_serve.core.setting_texts import Origin, WebHost, parse_host, parse_name, parse_origin
from lora_serve.server.route import ROUTES
from lora_serve.tenancy.authenticator import is_loopback

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


class BrowserGuard:
    """The guard of one application."""

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

    def _is_own(self, host: WebHost) -> bool:
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


def _host_text(said: str, host: WebHost | None) -> str:
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
