"""The rows of one answer in the engine: admitted together, their events read as they come, released together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import astuple, replace
from typing import cast

from lora_serve.core.errors import AdapterUnavailableError, EngineLostError, InternalError
from lora_serve.core.messages import Event, FinishEvent, LostEvent, PooledEvent, PromptEvent, Timings, TokenEvent
from lora_serve.core.request import InferenceRequest, OnCold
from lora_serve.core.tenant import LOCAL_CALLER
from lora_serve.server.context import RequestContext
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.overflow.decision import Upstream
from lora_serve.server.services import Services
from lora_serve.tenancy.quotas import concurrency_limits, waiting_limits
from lora_serve.tenancy.usage import AnswerUse, UsageKey

QUEUE_SIZE = 64  # events read ahead; a slow client then slows the readers of the rows, not the engine


class Rows:
    """All rows are computed or none is: an error of one row, or leaving the block of `admitted`, ends all of them.

    The engine lets the same adapters answer all rows that may fall back; should it ever not, no answer is given.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        model: ResolvedModel,
        requests: Sequence[InferenceRequest],
        *,
        use: AnswerUse | None = None,
        max_in_flight: int | None = None,
        shows_tokens: bool = True,  # false (`max_tokens: 0`): the tokens that end the rows are not shown, nor counted
    ) -> None:
        """`requests`: one per row. `use`: counts what they use; None: one of its own, for one choice per prompt.
        `max_in_flight`: rows that are in the engine at once; None: all of them.
        """
        self.context = context
        self.model = model
        self.requests = requests
        self.use = use or AnswerUse(requests)
        self.upstream: Upstream | None = None  # over a neighbour; set before `admitted`
        self.is_shown = False  # set as soon as the caller has some of the answer: nothing begins again then
        self._services = services
        self._shows_tokens = shows_tokens
        self._caller = context.caller or LOCAL_CALLER
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._timers = [
            services.metrics.sequence(request.tenant, context.started, len(request.prompt_token_ids))
            for request in requests
        ]
        self._in_flight = asyncio.Semaphore(max_in_flight or len(requests))
        self._running = set(self._numbers.values())
        self._undecided = {number for number, request in enumerate(requests) if request.fallback is not None}
        self._fell_back: bool | None = None  # None: not known yet, or no row has a fallback
        self._has_failed = False
        self._only: AsyncIterator[Event] | None = None  # the events of an answer of one row
        self._tasks: list[asyncio.Task[None]] = []  # one per row of an answer of several
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue(QUEUE_SIZE)

    @property
    def is_over(self) -> bool:
        """True once every row has ended."""
        return not self._running

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Take the rows through quota and queue and submit them. Leaving the block is their one way out: what still
        runs is aborted, places are given back, unused tokens returned to the quota, the use metered.

        Raises RateLimitedError, QueueFullError, TenantQueueFullError; then no row is begun. An answer that is lost with
        its engine before any of it was shown costs nothing.
        """
        services, caller = self._services, self._caller
        reservation = await services.quotas.reserve(caller, self.use.max_tokens)
        if reservation is not None:
            self.context.rate_limits = reservation.standings
        try:
            with nullcontext() if self.upstream is not None else self._queued(self.requests):
                async with self._submitted():
                    yield
        except Exception as error:
            self._has_failed = not isinstance(error, ConnectionError)  # a caller who leaves is no error
            if isinstance(error, EngineLostError) and not self.is_shown:
                self.use.all_lost()
            raise
        finally:
            services.quotas.settle(reservation, self.use.num_tokens)
            self._meter()

    async def next(self) -> tuple[int, Event]:
        """The next event, with its row's number, of a row that has not ended. After a LostEvent the row begins again.

        Raises the error that ended a row.
        """
        while True:
            event = await self._next_of_any()
            number = self._numbers[event.request_id]
            if number not in self._running:
                continue  # read ahead before the row was ended
            match event:
                case PromptEvent():
                    self._note_prompt(number, event)
                case TokenEvent():
                    self._timers[number].token()
                case PooledEvent():
                    self._timers[number].pooled()
                case LostEvent():
                    self._lose(number, event)
            return number, event

    def generated(self, number: int, num_tokens: int) -> None:
        """Count tokens of a row that the answer shows, or takes as its end."""
        if not self._shows_tokens:
            return
        self.use.generated(number, num_tokens)
        self.context.num_output_tokens += num_tokens

    def end(self, number: int, reason: str) -> None:
        """Take a row as ended; the engine's work on it is broken off if a stop string ended it."""
        self._running.discard(number)
        self._timers[number].finished(reason)
        self.use.ended(number)
        self._services.client.answered(self.requests[number].request_id)
        if self._tasks:
            self._tasks[number].cancel()

    @asynccontextmanager
    async def _submitted(self) -> AsyncIterator[None]:
        with ExitStack() as timers:
            for timer in self._timers:
                timers.enter_context(timer)
            if len(self.requests) == 1:  # the common case needs no tasks
                async with AsyncExitStack() as stack:
                    self._only = await stack.enter_async_context(self._row(0))
                    yield
                return
            self._tasks = [asyncio.create_task(self._read(number)) for number in range(len(self.requests))]
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def _row(self, number: int) -> AsyncIterator[AsyncIterator[Event]]:
        """Submit a row once its tenant may run one more. Leaving the block is the abort, so the engine's iterator is
        closed here and now, not by the garbage collector.
        """
        limits, deadline = concurrency_limits(self._caller), self.requests[number].deadline
        async with self._in_flight, self._services.quotas.concurrency.held(limits, deadline):
            request = self._as_decided(number)
            if self.upstream is None:
                events = self._services.client.infer(request)
            else:
                events = self.upstream.events(request, self._here, self.use.started)
            async with aclosing(cast(AsyncGenerator[Event, None], events)):
                yield events

    def _queued(self, requests: Sequence[InferenceRequest]) -> AbstractContextManager[None]:
        return self._services.client.gate.entered(requests, waiting_limits(self._caller), self.use.started)

    async def _here(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """A row that a neighbour has not computed."""
        with self._queued((request,)):
            events = self._services.client.infer(request)
            async with aclosing(cast(AsyncGenerator[Event, None], events)):
                async for event in events:
                    yield event

    async def _read(self, number: int) -> None:
        """One of several rows: its events, or the error that ends it, into the queue."""
        try:
            async with self._row(number) as events:
                async for event in events:
                    if isinstance(event, LostEvent) and self.is_shown:
                        raise event.error
                    await self._queue.put(event)
                    if isinstance(event, FinishEvent):
                        return
            raise self._without_end(number)
        except Exception as error:
            await self._queue.put(error)

    async def _next_of_any(self) -> Event:
        if self._only is not None:
            try:
                return await anext(self._only)
            except StopAsyncIteration:
                raise self._without_end(0) from None
        if isinstance(item := await self._queue.get(), Exception):
            raise item
        return item

    def _note_prompt(self, number: int, event: PromptEvent) -> None:
        """A row's prompt is computed: who answers is known now."""
        context, timings = self.context, event.timings
        self._timers[number].admitted(timings)
        self.use.prompt_computed(number, event)
        context.replicas[number] = event.replica
        context.timings = Timings(*map(max, astuple(timings), astuple(context.timings or timings)))
        if number not in self._undecided:
            return
        if self._fell_back not in (None, event.fell_back):
            raise AdapterUnavailableError("The adapter arrived while its fallback was answering; try again.")
        self._fell_back = event.fell_back
        if event.fell_back and self.model.fallback is not None:
            context.adapters, context.fell_back = self.model.fallback, self.requests[number].on_cold

    def _lose(self, number: int, event: LostEvent) -> None:
        if self.is_shown:
            raise event.error
        self.context.num_output_tokens -= self.use.counts(number)[1]
        self.use.lost(number)
        if len(self.requests) == 1:  # no other row depends on who answers
            self._fell_back, context = None, self.context
            context.adapters, context.fell_back = self.model.adapters, None

    def _as_decided(self, number: int) -> InferenceRequest:
        """Once one row has fallen back, or has not, the rows that are submitted later ask for the same adapters."""
        request = self.requests[number]
        if self._fell_back is None or number not in self._undecided:
            return request
        self._undecided.discard(number)
        decided = request.by_fallback() if self._fell_back else request
        return replace(decided, fallback=None, on_cold=OnCold.WAIT, max_cold_wait=None)

    @property
    def _tenant(self) -> str:
        """The caller's tenant, or the one that a caller who sees all acts for."""
        return (self.requests[0].account if self._caller.sees_all else None) or self._caller.tenant

    def _meter(self) -> None:
        """For the caller's tenant; a caller who acts for others' tenants is metered as they are."""
        figures, key_id, adapters = self.use.figures(), self._caller.key_id, self.context.adapters
        if adapters is None or not (self._tasks or self._only):  # no row was begun
            return
        for member in adapters.members:
            ref, route = member.ref, member.canary_route(self._services.catalog.snapshot.entries)
            self._services.activity.record(self._tenant, ref.name, ref.digest, failed=self._has_failed, route=route)
        if figures is not None:
            versions, digests = "+".join(adapters.versions), "+".join(adapters.digests)
            self._services.meter.record(UsageKey(self._tenant, adapters.model, versions, digests, key_id), figures)

    def _without_end(self, number: int) -> InternalError:
        return InternalError(f"The engine left {self.requests[number].request_id} without an end.")
