"""GET /, /ui, /ui/ and /ui/{file}: the console's page. Its data comes over the admin API, with the viewer's key."""

from __future__ import annotations

import asyncio
import re

from aiohttp import hdrs, web
from msgspec import Struct

from lora_serve import __version__
from lora_serve.console.files import INDEX, PageFile, page_files
from lora_serve.core.config import ServerConfig
from lora_serve.server.answers import WireError, json_response
from lora_serve.server.route import ROUTES, Access
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authentication.authenticator import is_loopback

# No inline code, nothing from elsewhere, no form that goes anywhere, no other page around it.
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
OFF = "The console is off: start the server with --ui."
_NO_GZIP = re.compile(r"\bgzip\s*;\s*q=0(\.0*)?\s*(,|$)")


class Root(Struct):
    """GET /"""

    version: str
    links: dict[str, str]  # relative
    routes: list[str]  # of inference, as `POST /v1/completions`


class ConsoleFacts(Struct):
    """GET /ui/about.json"""

    version: str
    asks_for_key: bool  # also for inference


def is_on(config: ServerConfig) -> bool:
    """True if the page is served: as --ui or --no-ui say, else where the server listens on loopback."""
    return is_loopback(config.host) if config.ui is None else config.ui


async def get_root(request: web.Request) -> web.StreamResponse:
    """The ways in: for a browser the console, else links and the routes of inference."""
    services, has_console = request.app[SERVICES], is_on(request.app[SERVICES].config)
    if has_console and "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return web.Response(status=307, headers={hdrs.LOCATION: "ui/", hdrs.VARY: hdrs.ACCEPT})
    taken = [route for route in request.app[ROUTES].routes if not route.tasks or services.spec.task in route.tasks]
    calls = [f"{route.method} {route.path}" for route in taken if route.access in (Access.INFERENCE, Access.MODELS)]
    links = {"docs": "docs", "openapi": "openapi.json"} | ({"console": "ui/"} if has_console else {})
    return json_response(Root(__version__, links, calls), headers={hdrs.VARY: hdrs.ACCEPT})


async def get_index(request: web.Request) -> web.StreamResponse:
    """The console's page, for a browser."""
    if not is_on(request.app[SERVICES].config):
        return _off()
    if not request.path.endswith("/"):  # relative, as a proxy may have put a path before it
        return web.Response(status=308, headers={hdrs.LOCATION: "ui/"})
    return _answer(request, (await asyncio.to_thread(page_files))[INDEX])


async def get_about(request: web.Request) -> web.StreamResponse:
    """The facts that the console's page needs before anybody has signed in."""
    services = request.app[SERVICES]
    if not is_on(services.config):
        return _off()
    return json_response(ConsoleFacts(__version__, services.authenticator.required))


async def get_file(request: web.Request) -> web.StreamResponse:
    """A file of the console's page."""
    if not is_on(request.app[SERVICES].config):
        return _off()
    file = (await asyncio.to_thread(page_files)).get(request.match_info["file"])
    if file is None:
        raise web.HTTPNotFound
    return _answer(request, file)


def _off() -> web.Response:
    return WireError(404, OFF, "invalid_request_error", code="not_found").response()


def _answer(request: web.Request, file: PageFile) -> web.Response:
    """The file, compressed for who takes that; 304 for who has it."""
    accepted = request.headers.get(hdrs.ACCEPT_ENCODING, "")
    packed = "gzip" in accepted and not _NO_GZIP.search(accepted)
    tag = file.etag + ("-gzip" if packed else "")
    headers = {
        hdrs.CACHE_CONTROL: "no-cache",  # kept, but asked about each time: a new version's files fit together
        hdrs.ETAG: f'"{tag}"',
        hdrs.VARY: hdrs.ACCEPT_ENCODING,
        "Content-Security-Policy": POLICY,
    }
    if any(known.value in (tag, "*") for known in request.if_none_match or ()):  # weak, too, as proxies make them
        return web.Response(status=304, headers=headers)
    if packed:
        headers[hdrs.CONTENT_ENCODING] = "gzip"
    body = file.compressed if packed else file.content
    return web.Response(body=body, headers=headers, content_type=file.media_type, charset="utf-8")
