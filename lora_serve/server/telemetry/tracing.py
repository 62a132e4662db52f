"""A trace per request, from its first to its last byte. Who collects traces is behind the seam RequestTraces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lora_serve.core.messages import Timings
from lora_serve.server.answers import CLIENT_LEFT
from lora_serve.server.context import CONTEXT, RequestContext
from lora_serve.server.route import ROUTES


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The end of a request as a trace tells it: never what was asked, nor what was answered."""

    status: int
    model: str | None  # that answered; None: none did
    fields: Mapping[str, object]  # as in the log: request_id, tenant, adapter, digest
    num_prompt_tokens: int
    num_output_tokens: int
    timings: Timings | None  # seconds; None: no prompt was computed
    decode: float | None  # seconds after the first token


class RequestSpan(Protocol):
    """One request under way."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, for the log."""

    def end(self, outcome: RequestOutcome) -> None:
        """To be called once."""


class RequestTraces(Protocol):
    """The collector of traces."""

    def begin(self, method: str, route: str, headers: Mapping[str, str]) -> RequestSpan:
        """`route`: the path of the route, empty if the URL has none. `headers` may name the caller's own trace."""

    def close(self) -> None:
        """Hand over the spans that are left, within seconds."""


def traced(traces: RequestTraces) -> Middleware:
    """A middleware that traces every request but probes. It goes around the one that answers, which fills in the
    request's context.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        table = request.app[ROUTES]
        if request.path in table.probe_paths:
            return await handler(request)
        route = table.find(request)
        span = traces.begin(request.method, route.path if route else "", request.headers)
        status = CLIENT_LEFT
        try:
            with structlog.contextvars.bound_contextvars(trace_id=span.trace_id):
                response = await handler(request)
            status = response.status
            return response
        finally:
            span.end(_outcome(request[CONTEXT], status))

    return middleware


def _outcome(context: RequestContext, status: int) -> RequestOutcome:
    return RequestOutcome(
        status,
        context.adapters.model if context.adapters else None,
        context.log_fields(),
        context.num_prompt_tokens,
        context.num_output_tokens,
        context.timings,
        context.decode,
    )
