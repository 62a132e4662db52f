"""GET /, /ui, /ui/ and /ui/{file}: the console's page, whose data comes over the admin API with the viewer's key; and
GET /admin/engine/stream: the engine at work, as server-sent events.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping

from aiohttp import hdrs, web
from msgspec import Struct

from lora_serve import __version__
from lora_serve.console.files import INDEX, PageFile, page_files
from lora_serve.console.live.frames import KEEP_ALIVE, Bye, Hello, Viewer, event
from lora_serve.console.live.hub import Hub, Watched
from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import RequestError
from lora_serve.core.live import LiveTier
from lora_serve.server.admin.protocol import StreamQuery
from lora_serve.server.answers import WireError, json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_query
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.openai.answering import SSE_HEADERS
from lora_serve.server.route import ROUTES, Access
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.authenticator import is_loopback

# No inline code, nothing from elsewhere, no form that goes anywhere, no other page around it.
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
OFF = "The console is off: start the server with --ui."
_NO_GZIP = re.compile(r"\bgzip\s*;\s*q=0(\.0*)?\s*(,|$)")
LIVE = web.AppKey("live", Hub)
SHUTTING_DOWN = "The server is shutting down."
KEY_SECONDS = 1.0  # between two looks whether the key still opens
SILENT_SECONDS = 15.0  # after which a comment shows that the stream is alive
UNSENT_BYTES = 2**16  # that the kernel takes beyond what is on its way: more would be old by the time it is read


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


def live_hub(services: Services) -> Hub:
    """The hub of an application."""

    async def store_tiers() -> Mapping[str, LiveTier]:
        return {name: LiveTier.of(tier) for name, tier in (await services.store_tiers()).items()}

    def ending() -> str | None:
        lifecycle = services.lifecycle
        if lifecycle.state is ServerState.DRAINING:
            return SHUTTING_DOWN
        return lifecycle.reason if lifecycle.state is ServerState.FAILED else None

    def owns(tenant: str, since: float, name: str, digest: str) -> bool:
        entry = services.catalog.snapshot.entries.get(name)
        is_known = entry is not None and entry.tenant == tenant and digest in entry.digests
        return is_known or any(one.id == name for one in services.registering.seen_by(tenant, since))

    return Hub(Watched(services.client, store_tiers, lambda: services.metrics.num_engine_restarts, ending, owns))


async def stream_engine(request: web.Request) -> web.StreamResponse:
    """Watch the engine at work.

    Server-sent events: `hello` with what does not change, then frames (`rate` a second at most), each whole in itself,
    and `bye` with the reason when the stream ends. A reader that lags misses frames. A tenant's own admin sees its own
    requests and adapters alone.
    """
    hub, context = request.app[LIVE], request[CONTEXT]
    caller, rate = context.known_caller, check_query(StreamQuery, request).rate
    scope = caller.scope
    response = web.StreamResponse(headers=SSE_HEADERS)
    if request.method == hdrs.METH_HEAD:
        return response
    async with hub.viewing(scope, rate, caller.since) as viewer:
        await response.prepare(request)
        _limit_unsent(request)
        await response.write(event(_hello(request.app[SERVICES], hub, scope, rate)))
        await _write_frames(request, response, viewer)
    await response.write_eof()
    return response


def _hello(services: Services, hub: Hub, scope: str | None, rate: int) -> Hello:
    settings = hub.settings
    return Hello(
        __version__,
        hub.started,
        services.base_name,
        rate,
        scope,
        services.config.engine,
        settings.max_num_seqs,
        settings.block_size,
        settings.targets,
    )


async def _write_frames(request: web.Request, response: web.StreamResponse, viewer: Viewer) -> None:
    """Writes until the last event. A frame is dropped if the one before it has not left."""
    now = asyncio.get_running_loop().time
    looked_at = written_at = now()
    is_last = False
    while not is_last:
        data = await viewer.next()
        is_last = viewer.is_over
        if now() - looked_at >= KEY_SECONDS:
            looked_at = now()
            try:
                request[CONTEXT].enter_again()
            except RequestError as error:
                data, is_last = event(Bye(str(error))), True
        if data is None and now() - written_at >= SILENT_SECONDS:
            data = KEEP_ALIVE
        if data is not None and (is_last or not _num_unsent(request)):
            await response.write(data)
            written_at = now()


def _num_unsent(request: web.Request) -> int:
    transport = request.transport
    return 0 if transport is None else transport.get_write_buffer_size()


def _limit_unsent(request: web.Request) -> None:
    """Lets the kernel take little more than the network does, so that a slow reader shows here."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
