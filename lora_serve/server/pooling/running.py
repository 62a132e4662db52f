"""Inputs of one answer, pooled together: all of them, or none if one fails or the caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from lora_serve.core.errors import InternalError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, PooledEvent, PromptEvent, TokenEvent
from lora_serve.core.request import InferenceRequest, OnCold
from lora_serve.server.context import RequestContext
from lora_serve.server.openai.answer import Admitted
from lora_serve.server.openai.generation import note_admitted
from lora_serve.server.openai.merge import merge
from lora_serve.server.permits import Permit, permitted
from lora_serve.server.services import Services

MAX_IN_FLIGHT = 256  # of one answer: more than a step takes, and not the whole queue of all callers

Made = Admitted | PooledEvent


async def run_pooled(
    services: Services, context: RequestContext, requests: Sequence[InferenceRequest]
) -> tuple[list[bytes], bool]:
    """The vectors in the order of the requests (float32, little-endian), and whether the fallback made them."""
    vectors: list[bytes] = [b""] * len(requests)
    async with permitted(services, context, requests) as permit:
        run = _Run(services, context, permit)
        with services.client.gate.entered(requests, permit.lines, permit.use.started):
            async with aclosing(merge([run.one(request) for request in requests])) as events:
                async for number, event in events:
                    if isinstance(event, Admitted):
                        permit.use.admitted(number, event.timings, event.num_cached_tokens)
                        note_admitted(context, event, run.outcomes)
                    else:
                        permit.use.ended(number)
                        vectors[number] = event.values
    return vectors, True in run.outcomes


class _Run:
    """`outcomes`: whether those with a fallback fell back; once one is known, all others are asked for the same."""

    def __init__(self, services: Services, context: RequestContext, permit: Permit) -> None:
        self._services = services
        self._context = context
        self._permit = permit
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.outcomes: set[bool] = set()

    async def one(self, request: InferenceRequest) -> AsyncGenerator[Made, None]:
        async with self._places, self._permit.row(request):
            request = self._as_decided(request)
            # Leaving the engine's iterator is the abort, so it must be closed here and now.
            async with aclosing(self._events(request)) as made:
                async for item in made:
                    yield item

    async def _events(self, request: InferenceRequest) -> AsyncGenerator[Made, None]:
        metrics, count = self._services.metrics, len(request.prompt_token_ids)
        with metrics.sequence(request.tenant, self._context.started, count) as timer:
            async with aclosing(cast(AsyncGenerator[Event, None], self._services.client.infer(request))) as events:
                async for event in events:
                    match event:
                        case PromptEvent():
                            timer.admitted(event.timings)
                            fell_back = None if request.fallback is None else event.fell_back
                            yield Admitted(event.timings, None, fell_back=fell_back)
                        case PooledEvent():
                            timer.pooled()
                            yield event
                        case FinishEvent():
                            timer.finished(event.reason)
                            return
                        case ErrorEvent():
                            raise event.error
                        case TokenEvent():
                            raise InternalError(f"The engine continued {request.request_id}, which was to be pooled.")
        raise InternalError(f"The engine left {request.request_id} without an end.")

    def _as_decided(self, request: InferenceRequest) -> InferenceRequest:
        if request.fallback is None or not self.outcomes:
            return request
        uses = request.fallback if True in self.outcomes else request.adapters
        return replace(request, adapters=uses, fallback=None, on_cold=OnCold.WAIT, max_cold_wait=None)
