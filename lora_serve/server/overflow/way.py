"""The way of one answer's rows over a neighbour, and back here if that fails before anything was shown."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponse

from lora_serve.core.errors import NeighbourLostError, RequestTimeoutError
from lora_serve.core.messages import Event, FinishEvent, PromptEvent, Timings
from lora_serve.core.request import InferenceRequest
from lora_serve.server.context import RequestContext
from lora_serve.server.overflow.neighbour import Neighbour
from lora_serve.server.overflow.outcome import NeighbourError, Outcome, OverflowMetrics
from lora_serve.server.overflow.reading import completion_body, embedding_body, salt_of, tokens_of, vector_of

_log = logging.getLogger(__name__)
Here = Callable[[InferenceRequest], AsyncGenerator[Event, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The facts of a request to a neighbour, and of the reading of its answer."""

    model: str  # the name there
    digests: str  # of the version that would answer here
    vocab_size: int
    dimension: int  # of a vector; 0: the model has none
    ends: tuple[int, ...]  # the model's own end-of-text tokens
    stop: tuple[str, ...]  # strings at which the neighbour may end too
    is_whole: bool  # nothing is shown before the end, so that all may be asked for again
    patience: float  # seconds for the first token
    gap: float  # seconds between two tokens
    whole: float  # seconds for all of them
    salt: bytes  # see `salt_of`


class Way:
    """The events of rows as if the engine had given them."""

    def __init__(self, neighbour: Neighbour, asked: Asked, context: RequestContext, metrics: OverflowMetrics) -> None:
        self._neighbour = neighbour
        self._asked = asked
        self._context = context
        self._metrics = metrics

    async def events(
        self, request: InferenceRequest, here: Here, on_start: Callable[[str], None]
    ) -> AsyncGenerator[Event, None]:
        """Like `EngineClient.infer`. `here`: computes a row on this server. `on_start`: the neighbour is at work.

        Raises NeighbourLostError, RequestTimeoutError, what `here` raises.
        """
        kept: list[Event] = []
        has_begun = False
        try:
            async with aclosing(self._counted(request, on_start)) as there:
                async for event in there:
                    if self._asked.is_whole:
                        kept.append(event)
                        continue
                    if not has_begun:
                        has_begun, self._context.served_by = True, self._neighbour.name
                    yield event
        except NeighbourError as error:
            _log.info("overflow: %s has not computed %s: %s", self._neighbour.name, request.request_id, error)
            if has_begun:
                message = "The server that computed this answer broke off: retry the request."
                raise NeighbourLostError(message) from error
            async with aclosing(here(request)) as events:
                async for event in events:
                    yield event
            return
        if kept:
            self._context.served_by = self._neighbour.name
        for event in kept:
            yield event

    async def _counted(self, request: InferenceRequest, on_start: Callable[[str], None]) -> AsyncGenerator[Event, None]:
        """The neighbour's events; the breaker and the metrics hear what became of them. Raises NeighbourError."""
        neighbour, asked = self._neighbour, self._asked
        if not neighbour.may_be_asked(1, asked.model, asked.digests):
            raise NeighbourError(Outcome.UNREACHABLE, "it has failed meanwhile")
        outcome, sent_at = Outcome.LEFT, time.monotonic()
        try:
            with neighbour.row():
                async with aclosing(self._there(request, on_start)) as there:
                    async for event in there:
                        if outcome is Outcome.LEFT:
                            outcome = Outcome.ANSWERED  # also if the caller, or a stop string, ends it from here on
                            neighbour.began(time.monotonic() - sent_at)
                        yield event
            neighbour.answered()
        except NeighbourError as error:
            outcome = error.outcome
            neighbour.failed(error, asked.model, asked.digests)
            raise
        finally:
            self._metrics.count(neighbour.name, outcome)
            if outcome is Outcome.LEFT:
                neighbour.breaker.abandoned()

    async def _there(self, request: InferenceRequest, on_start: Callable[[str], None]) -> AsyncGenerator[Event, None]:
        """The neighbour's events; the first of them once its first token is there. Raises NeighbourError."""
        asked, asked_at = self._asked, time.monotonic()
        path, body = self._words(request)
        async with AsyncExitStack() as stack:
            async with _in_time(request, asked_at + asked.patience):
                answer = self._neighbour.answer(path, body, request.request_id, asked.digests)
                response = await stack.enter_async_context(answer)
                on_start(request.request_id)
                rest = self._read(response, request, body)
                await stack.enter_async_context(aclosing(rest))
                event = await anext(rest)
            timings = Timings(asked_at - request.arrival_time, 0.0, time.monotonic() - asked_at)
            yield PromptEvent(request.request_id, timings, None)
            yield event
            while not isinstance(event, FinishEvent):
                async with _in_time(request, min(time.monotonic() + asked.gap, asked_at + asked.whole)):
                    event = await anext(rest)
                yield event

    def _words(self, request: InferenceRequest) -> tuple[str, dict[str, Any]]:
        asked, sampling = self._asked, request.sampling
        if request.pooling is not None:
            return "/v1/embeddings", embedding_body(request, asked.model)
        ends = dict.fromkeys(sampling.ends(asked.ends))
        salt = salt_of(request, asked.salt)
        return "/v1/completions", completion_body(request, asked.model, list(ends), asked.stop, salt)

    def _read(
        self, response: ClientResponse, request: InferenceRequest, body: dict[str, Any]
    ) -> AsyncGenerator[Event, None]:
        if request.pooling is not None:
            return vector_of(response, request, self._asked.dimension)
        return tokens_of(response, request, self._asked.vocab_size, frozenset(body["stop_token_ids"]))


@asynccontextmanager
async def _in_time(request: InferenceRequest, until: float) -> AsyncIterator[None]:
    """Raises NeighbourError if the block is not done at `until`, RequestTimeoutError if the request's time is over."""
    deadline = math.inf if request.deadline is None else request.deadline
    try:
        async with asyncio.timeout_at(min(until, deadline)):
            yield
    except TimeoutError:
        if deadline <= until:
            raise RequestTimeoutError("The request's timeout_ms passed before it was done.") from None
        raise NeighbourError(Outcome.SLOW, "it gave no token in time") from None
