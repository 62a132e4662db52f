"""Around every request that is no probe: a span from its first to its last byte, and its id in every line of log."""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lora_serve.server.answers.errors import CLIENT_LEFT
from lora_serve.server.context import CONTEXT, RequestContext
from lora_serve.server.route import ROUTES
from lora_serve.server.telemetry.request_traces import Outcome, RequestTraces


def traced(traces: RequestTraces) -> Middleware:
    """Around the middleware that answers: by then the context says everything."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        table = request.app[ROUTES]
        if request.path in table.probe_paths:
            return await handler(request)
        span = traces.begin(request.method, route.path if (route := table.find(request)) else "", request.headers)
        status = CLIENT_LEFT
        try:
            with structlog.contextvars.bound_contextvars(trace_id=span.trace_id):
                response = await handler(request)
            status = response.status
            return response
        finally:
            span.end(_outcome(request[CONTEXT], status))

    return middleware


def _outcome(context: RequestContext, status: int) -> Outcome:
    return Outcome(
        status,
        context.adapters.model if context.adapters else None,
        context.log_fields(),
        context.num_prompt_tokens,
        context.num_output_tokens,
        context.timings,
        context.decode,
    )
