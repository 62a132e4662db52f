"""Requests that would wait here longer than allowed, and longer than at a neighbour: which of them leave, to whom, and
what becomes of them there. What fails before anything was shown is computed here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponse, web
from prometheus_client import CollectorRegistry, Counter, Gauge

from lora_serve.client.base import EngineClient
from lora_serve.core.errors import LoraServeError, NeighbourLostError, RequestTimeoutError
from lora_serve.core.messages import Event, FinishEvent, PromptEvent, Timings
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.overflow import ModelMap, OverflowConfig
from lora_serve.server.background.tasks import running
from lora_serve.server.context import CONTEXT, AdapterSet, RequestContext
from lora_serve.server.overflow.neighbour import HEADER, BreakerState, Neighbour
from lora_serve.server.overflow.reading import (
    NeighbourError,
    NeighbourOutcome,
    can_leave,
    completion_body,
    embedding_body,
    salt_of,
    tokens_of,
    vector_of,
)

_log = logging.getLogger(__name__)
ComputeHere = Callable[[InferenceRequest], AsyncGenerator[Event, None]]
LEAST_PATIENCE = 1.0  # seconds
PLACES_INTERVAL = 1.0  # seconds
PROBE_INTERVAL = 0.5  # seconds between two looks for neighbours that have rested


class Overflow:
    """The neighbours, and who may go there."""

    def __init__(
        self,
        config: OverflowConfig,
        client: EngineClient,
        registry: CollectorRegistry,
        may_leave: Callable[[str], bool],
    ) -> None:
        """`may_leave`: whether a tenant lets neighbours compute its answers, or others' with its adapters."""
        self._config = config
        self._client = client
        self._gate = client.gate
        self._may_leave = may_leave
        self._id = secrets.token_hex(8)
        self._salt = secrets.token_bytes(32)
        self._map = ModelMap(config.overflow_model_map)
        self.neighbours = tuple(
            Neighbour(name, url, config.overflow_api_key, f"{self._id}.{number}")
            for number, (name, url) in enumerate(config.neighbours)
        )
        up = {one.name: lambda one=one: float(one.breaker.state is not BreakerState.OPEN) for one in self.neighbours}
        self._metrics = OverflowMetrics(registry, up)

    def may_take(self, request: web.Request, tenant: str) -> bool:
        """True if some neighbour may be asked, unless the body forbids it: then a full queue is no reason to refuse a
        request unread.
        """
        if HEADER in request.headers:
            self._check_sender(request.headers[HEADER])
            return False
        if not self._may_leave(tenant):
            return False
        return any(neighbour.may_be_asked(1, "", "") for neighbour in self.neighbours)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the neighbours' connections and look after those that failed, for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            for neighbour in self.neighbours:
                await stack.enter_async_context(neighbour.running())
            works = [functools.partial(self._look_after, neighbour) for neighbour in self.neighbours]
            await stack.enter_async_context(running(self._follow_places, *works, name="overflow"))
            yield

    def upstream_for(
        self,
        request: web.Request,
        adapters: AdapterSet,
        spec: ModelSpec,
        rows: Sequence[InferenceRequest],
        *,
        is_whole: bool,
        stop: tuple[str, ...] = (),
    ) -> Upstream | None:
        """The neighbour for the rows; None: they are computed here. See `UpstreamRequest` for `is_whole` and `stop`."""
        if HEADER in request.headers:
            self._check_sender(request.headers[HEADER])
            return None
        wait = self._gate.predicted_wait(rows)
        if wait <= self._config.overflow_after_ms / 1000:
            return None
        model = self._name_at_neighbours(adapters, rows)
        if model is None:
            return None
        digests = ",".join(adapters.digests)
        able = [one for one in self.neighbours if one.may_be_asked(len(rows), model, digests) and one.expected < wait]
        if not able:
            return None
        asked = UpstreamRequest(
            model=model,
            digests=digests,
            vocab_size=spec.vocab_size,
            dimension=0 if spec.pooling is None else spec.pooling.dimension,
            ends=spec.eos_token_ids,
            stop=stop if is_whole else (),
            is_whole=is_whole,
            patience=min(self._config.overflow_timeout_ms / 1000, max(LEAST_PATIENCE, wait)),
            gap=self._config.overflow_gap_ms / 1000,
            whole=self._config.overflow_answer_ms / 1000,
            salt=self._salt,
        )
        return Upstream(min(able, key=lambda one: one.expected), asked, request[CONTEXT], self._metrics)

    def _name_at_neighbours(self, adapters: AdapterSet, rows: Sequence[InferenceRequest]) -> str | None:
        """The name under which neighbours know the model (the adapter's, or the base's); None: the rows stay here."""
        if adapters.is_composed or not all(map(can_leave, rows)):
            return None
        first = rows[0]
        tenants = {first.tenant, first.account or first.tenant, *(member.ref.tenant for member in adapters.members)}
        if not all(map(self._may_leave, tenants)):
            return None
        named = adapters.named
        if named is None:
            return None if adapters.members else self._map.target(adapters.base_name)
        is_only = not named.names_version and named.entry.route.canary is None
        return self._map.target(named.entry.name, named.version.version, is_only=is_only)

    def _check_sender(self, sender: str) -> None:
        """A request that this very server has sent shows that a neighbour is the server itself."""
        for neighbour in self.neighbours:
            if sender == neighbour.sender and not neighbour.is_self:
                neighbour.is_self = True
                _log.error("--overflow: %s is this server itself; it is not asked any more", neighbour.name)

    async def _follow_places(self) -> None:
        """Ask the engine now and then how many rows it runs at once, which may be changed and depends on its load."""
        while True:
            with suppress(LoraServeError):  # it is being restarted
                batcher = (await self._client.stats()).batcher
                self._gate.forecast.places = None if batcher is None else batcher.max_rows
            await asyncio.sleep(PLACES_INTERVAL)

    async def _look_after(self, neighbour: Neighbour) -> None:
        """Look at a neighbour at start, and after each rest of its breaker."""
        started = time.monotonic()
        models = await neighbour.probe()
        if models is not None:
            took = time.monotonic() - started
            _log.info("overflow: the neighbour %s serves %d models (%.0f ms)", neighbour.name, len(models), 1000 * took)
            for target in self._map.targets:
                if target not in models:
                    _log.warning("--overflow-model-map: %r is no model of the neighbour %s", target, neighbour.name)
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            if neighbour.breaker.wants_probe:
                neighbour.breaker.probed(is_well=await neighbour.probe() is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
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


class Upstream:
    """The events of rows as if the engine had given them."""

    def __init__(
        self, neighbour: Neighbour, asked: UpstreamRequest, context: RequestContext, metrics: OverflowMetrics
    ) -> None:
        self._neighbour = neighbour
        self._asked = asked
        self._context = context
        self._metrics = metrics

    async def events(
        self, request: InferenceRequest, here: ComputeHere, on_start: Callable[[str], None]
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
            raise NeighbourError(NeighbourOutcome.UNREACHABLE, "it has failed meanwhile")
        outcome, sent_at = NeighbourOutcome.LEFT, time.monotonic()
        try:
            with neighbour.row():
                async with aclosing(self._there(request, on_start)) as there:
                    async for event in there:
                        if outcome is NeighbourOutcome.LEFT:
                            outcome = (
                                NeighbourOutcome.ANSWERED
                            )  # also if the caller, or a stop string, ends it from here on
                            neighbour.began(time.monotonic() - sent_at)
                        yield event
            neighbour.answered()
        except NeighbourError as error:
            outcome = error.outcome
            neighbour.failed(error, asked.model, asked.digests)
            raise
        finally:
            self._metrics.count(neighbour.name, outcome)
            if outcome is NeighbourOutcome.LEFT:
                neighbour.breaker.abandoned()

    async def _there(self, request: InferenceRequest, on_start: Callable[[str], None]) -> AsyncGenerator[Event, None]:
        """The neighbour's events; the first of them once its first token is there. Raises NeighbourError."""
        asked, asked_at = self._asked, time.monotonic()
        path, body = self._body_for(request)
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

    def _body_for(self, request: InferenceRequest) -> tuple[str, dict[str, Any]]:
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
        raise NeighbourError(NeighbourOutcome.SLOW, "it gave no token in time") from None


class OverflowMetrics:
    """Counts by neighbour. Neighbours are named by the settings only, so that no caller can grow the series."""

    def __init__(self, registry: CollectorRegistry, neighbours: Mapping[str, Callable[[], float]]) -> None:
        """`neighbours`: by name, 1 if it may be asked and 0 if not."""
        self._requests = Counter(
            "lora_serve_overflow_requests",
            "Rows that a neighbour was asked for, by what became of them.",
            ["neighbour", "outcome"],
            registry=registry,
        )
        up = Gauge(
            "lora_serve_overflow_neighbour_up",
            "0 while the neighbour is left alone, as it has failed.",
            ["neighbour"],
            registry=registry,
        )
        for name, is_up in neighbours.items():
            for outcome in NeighbourOutcome:
                self._requests.labels(name, outcome)
            up.labels(name).set_function(is_up)

    def count(self, neighbour: str, outcome: NeighbourOutcome) -> None:
        self._requests.labels(neighbour, outcome).inc()
