"""GET /health, /ping, /ready and /version."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

from lora_serve import __version__
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.server.lifecycle import RETRY_AFTER, ServerState
from lora_serve.server.schemas.answers.operation import Kernels
from lora_serve.server.services import SERVICES

ENGINE_TIMEOUT = 0.05  # seconds that /health waits for an engine in the middle of a step; probes wait for a second


async def get_health(request: web.Request) -> web.StreamResponse:
    """Whether the process is alive.

    200 while the process can still do its work, ready or not; 503 once the engine is dead.
    """
    services = request.app[SERVICES]
    lifecycle = services.lifecycle
    if lifecycle.state is ServerState.FAILED:
        raise NotReadyError(lifecycle.reason, retry_after=RETRY_AFTER)
    if lifecycle.state is ServerState.READY:
        with suppress(TimeoutError, EngineLostError):  # a long step is no failure; a lost engine is started again
            await asyncio.wait_for(services.client.stats(), ENGINE_TIMEOUT)
    return web.json_response({"status": "ok", "state": lifecycle.state.value})


async def get_ready(request: web.Request) -> web.StreamResponse:
    """Whether requests are taken.

    200 from the end of the warm-up until the server drains; with a reason while changes are refused.
    """
    services = request.app[SERVICES]
    lifecycle = services.lifecycle
    if lifecycle.state is not ServerState.READY:
        raise NotReadyError(lifecycle.reason, retry_after=RETRY_AFTER)
    if not services.client.is_there:
        raise NotReadyError("No engine is there at present.", retry_after=RETRY_AFTER)
    shared = services.catalog.ledger.problem if services.catalog.is_shared else None
    problem = services.store_problem or shared
    more = {} if problem is None else {"read_only": True, "reason": problem}
    return web.json_response({"status": "ready", **more})


async def get_version(request: web.Request) -> web.StreamResponse:
    """The server's version, and its kernels.

    `kernels` is null where the model runs on a GPU.
    """
    kernels = request.app[SERVICES].spec.kernels
    told = None if kernels is None else {name: getattr(kernels, name) for name in Kernels.model_fields}
    return web.json_response({"version": __version__, "kernels": told})
