"""GET /admin/engine/stream: the engine at work, as server-sent events."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from aiohttp import hdrs, web

from lora_serve import __version__
from lora_serve.console.live.channel import Viewer
from lora_serve.console.live.frames import KEEP_ALIVE, Bye, Hello, event
from lora_serve.console.live.hub import Hub, Watched
from lora_serve.core.errors import RequestError
from lora_serve.core.live import LiveTier
from lora_serve.server.admin.protocol import StreamQuery
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_query
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.openai.answering import HEADERS
from lora_serve.server.services import SERVICES, Services

LIVE = web.AppKey("live", Hub)
SHUTTING_DOWN = "The server is shutting down."
KEY_SECONDS = 1.0  # between two looks whether the key still opens
SILENT_SECONDS = 15.0  # after which a comment shows that the stream is alive
UNSENT_BYTES = 2**16  # that the kernel takes beyond what is on its way: more would be old by the time it is read


def live_hub(services: Services) -> Hub:
    """The hub of an application."""

    async def store_tiers() -> Mapping[str, LiveTier]:
        return {
            name: LiveTier(
                tier.num_bytes, tier.budget_bytes, tier.num_items, tier.hits, tier.misses, tier.loads, tier.evictions
            )
            for name, tier in (await services.store_tiers()).items()
        }

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
    response = web.StreamResponse(headers=HEADERS)
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
