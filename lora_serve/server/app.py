"""The aiohttp application: its middlewares, its routes, and the tasks that run beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Middleware

from lora_serve.server.browser_guard import BrowserGuard
from lora_serve.server.console import LIVE, SHUTTING_DOWN, live_hub
from lora_serve.server.context import add_headers
from lora_serve.server.middleware import PROBED, WRONG_KEYS, answer, guarded
from lora_serve.server.route import ROUTES
from lora_serve.server.routes import TABLE
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.sockets.connections import CONNECTIONS, Connections
from lora_serve.server.telemetry.tracing import traced
from lora_serve.server.upkeep import Reconciler, following_budgets, metering, noting_uses, probing
from lora_serve.tenancy.authenticator import WrongKeys


def build_app(services: Services) -> web.Application:
    """Run it with HttpRunner (`handler_cancellation=True`), or a client's disconnect never reaches the handlers."""
    connections = Connections(services.config)
    guard = BrowserGuard(services.config, asks_for_key=services.authenticator.required)
    around: list[Middleware] = [connections.middleware, answer, guard.middleware]
    if services.traces is not None:
        around.insert(1, traced(services.traces))
    app = web.Application(middlewares=around, client_max_size=services.config.max_body_size)
    app[SERVICES], app[CONNECTIONS], app[ROUTES] = services, connections, TABLE
    app[PROBED], app[LIVE] = {}, live_hub(services)
    app[WRONG_KEYS] = WrongKeys(services.config.wrong_keys_per_minute)
    app.cleanup_ctx.extend((_reconciling, noting_uses, following_budgets, metering, connections.watching, probing))
    if services.overflow is not None:
        app.cleanup_ctx.append(_asking_neighbours)
    app.on_shutdown.append(_end_live_views)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(guard.add_headers)
    for ending in ("", "/"):  # as vLLM's framework, which leads `/v1/models/` to `/v1/models`
        app.add_routes([web.RouteDef(one.method, one.pattern + ending, guarded(one), {}) for one in TABLE.routes])
    return app


async def _end_live_views(app: web.Application) -> None:
    """Open connections are waited for from here on."""
    app[LIVE].close(SHUTTING_DOWN)


async def _reconciling(app: web.Application) -> AsyncIterator[None]:
    async with Reconciler(app[SERVICES]).running():
        yield


async def _asking_neighbours(app: web.Application) -> AsyncIterator[None]:
    overflow = app[SERVICES].overflow
    assert overflow is not None
    async with overflow.running():
        yield
