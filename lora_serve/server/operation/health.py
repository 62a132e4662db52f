"""GET /health, /ping, /ready and /version."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, convert

from lora_serve import __version__
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.server.answers import json_response
from lora_serve.server.lifecycle import RETRY_AFTER, ServerState
from lora_serve.server.services import SERVICES

ENGINE_TIMEOUT = 0.05  # seconds that /health waits for an engine in the middle of a step; probes wait for a second


class Health(Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    state: ServerState


class Readiness(Struct, kw_only=True):
    status: Literal["ready"] = "ready"
    read_only: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Kernels(Struct):
    """Fields of `KernelDescription`."""

    level: str
    dtype: str
    order: Annotated[str, Meta(extra_json_schema={"enum": ["plain", "dot", "blocks", "none"]})]
    source: Annotated[str, Meta(extra_json_schema={"enum": ["shipped", "compiled", "torch"]})]


class Version(Struct):
    version: str
    kernels: Kernels | None


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
    return json_response(Health(state=lifecycle.state))


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
    return json_response(Readiness() if problem is None else Readiness(read_only=True, reason=problem))


async def get_version(request: web.Request) -> web.StreamResponse:
    """The server's version, and its kernels.

    `kernels` is null where the model runs on a GPU.
    """
    kernels = request.app[SERVICES].spec.kernels
    shown = None if kernels is None else convert(kernels, Kernels, from_attributes=True)
    return json_response(Version(__version__, shown))
