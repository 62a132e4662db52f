"""Rows of one answer: no event is lost, and no row is left open in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from lora_serve.core.errors import EngineLostError
from lora_serve.core.messages import Event, FinishEvent, LostEvent, PromptEvent, Timings, TokenEvent
from lora_serve.core.request import FinishReason, InferenceRequest, OnCold
from lora_serve.core.tenant import Caller
from lora_serve.server.context import AdapterSet, RequestContext
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.inference.rows import QUEUE_SIZE, Rows
from lora_serve.server.services import Services


class Source:
    """The engine's side of one row: `count` tokens, then its end or an error; notes whether it was closed."""

    def __init__(
        self, count: int, error: Exception | None = None, delay: float = 0.0, ends: bool = True, lost: bool = False,
        replica: str = "",
    ) -> None:  # fmt: skip
        self.replica = replica
        self.lost = lost  # first, after three tokens
        self.count, self.error, self.delay, self.ends = count, error, delay, ends
        self.produced = 0
        self.closed = False

    async def events(self, request_id: str) -> AsyncIterator[Event]:
        try:
            if self.lost:
                yield PromptEvent(request_id, Timings(1.0, 1.0, 1.0), None, replica="lost")
                for number in range(3):
                    yield TokenEvent(request_id, 1000 + number, None)
                yield LostEvent(request_id, EngineLostError("gone", 1.0))
            yield PromptEvent(request_id, Timings(0.0, 0.0, 0.0), None, replica=self.replica)
            for number in range(self.count):
                await asyncio.sleep(self.delay)
                self.produced += 1
                yield TokenEvent(request_id, number, None)
            if self.error is not None:
                raise self.error
            if self.ends:
                yield FinishEvent(request_id, FinishReason.LENGTH)
        finally:
            self.closed = True


def rows_of(services: Services, sources: list[Source]) -> Rows:
    by_id = {f"r-{number}": source for number, source in enumerate(sources)}
    assert services.client is not None
    services.client.infer = lambda request: by_id[request.request_id].events(request.request_id)
    requests = [InferenceRequest(name, (1, 2)) for name in by_id]
    context = RequestContext()
    context.caller = Caller("acme")
    context.adapters = AdapterSet((), "tiny-base")
    model = ResolvedModel(context.adapters, None, services.text, services.spec)
    return Rows(services, context, model, requests)


async def read_all(rows: Rows) -> dict[int, list[int]]:
    """The tokens of each row, to the end of all of them."""
    found: dict[int, list[int]] = {}
    async with rows.admitted():
        while not rows.is_over:
            number, event = await rows.next()
            if isinstance(event, TokenEvent):
                found.setdefault(number, []).append(event.token_id)
                rows.generated(number, 1)
            if isinstance(event, LostEvent):
                del found[number]
            if isinstance(event, FinishEvent):
                rows.end(number, event.reason)
    return found


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_event_comes_once_and_in_its_rows_order(services: Services, count: int) -> None:
    sources = [Source(10 * number, delay=0.0001) for number in range(1, count + 1)]
    found = await read_all(rows_of(services, sources))
    assert found == {number: list(range(source.count)) for number, source in enumerate(sources)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_row_that_is_lost_and_begins_again_is_counted_once(services: Services, count: int) -> None:
    rows = rows_of(services, [Source(5, lost=True) for _ in range(count)])
    assert await read_all(rows) == {number: list(range(5)) for number in range(count)}
    assert rows.context.num_output_tokens == 5 * count
    assert rows.use.counts() == (2 * count, 5 * count, 0)


async def test_all_replicas_that_computed_an_answer_are_known(services: Services) -> None:
    """Rows of one answer meet on one, but for one that was lost, and rows that ran one after another."""
    sources = [Source(1, replica="b"), Source(2, replica="a", lost=True), Source(1, replica="b"), Source(1)]
    rows = rows_of(services, sources)
    assert "replica" not in rows.context.log_fields()
    await read_all(rows)
    assert set(rows.context.replica_names) == {"a", "b"}  # the fourth was a neighbour's
    assert rows.context.log_fields()["replica"] == ",".join(rows.context.replica_names)


async def test_row_that_begins_again_may_be_answered_by_another(services: Services) -> None:
    """Its adapter is cold on the other engine, or it was on the first."""
    for order in ((True, False), (False, True)):
        rows = rows_of(services, [Source(1, lost=True)])
        infer, fell_back = services.client.infer, iter(order)

        async def falling(request: InferenceRequest, infer: Any = infer, fell: Any = fell_back) -> AsyncIterator[Event]:
            async for event in infer(request):
                yield structs.replace(event, fell_back=next(fell)) if isinstance(event, PromptEvent) else event

        services.client.infer = falling
        requests = [replace(request, fallback=(), on_cold=OnCold.BASE) for request in rows.requests]
        model = replace(rows.model, fallback=AdapterSet((), "another-base"))
        again = Rows(services, rows.context, model, requests)
        assert await read_all(again) == {0: [0]}
        assert again.context.adapters is (model.fallback if order[-1] else model.adapters)
        assert again.context.fell_back is (OnCold.BASE if order[-1] else None)


@pytest.mark.parametrize("count", [1, 3])
async def test_first_error_is_raised_and_every_row_closed(services: Services, count: int) -> None:
    sources = [Source(1, KeyError("mine")), *(Source(10**6, delay=0.001) for _ in range(count - 1))]
    with pytest.raises(KeyError, match="mine"):
        await read_all(rows_of(services, sources))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_row_that_the_engine_leaves_without_an_end_is_an_error(services: Services, count: int) -> None:
    sources = [Source(1, ends=False), *(Source(10**6, delay=0.001) for _ in range(count - 1))]
    with pytest.raises(Exception, match="The engine left r-0 without an end"):
        await read_all(rows_of(services, sources))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_closes_every_row_and_nobody_waits_any_more(services: Services, count: int) -> None:
    sources = [Source(10**6) for _ in range(count)]
    rows = rows_of(services, sources)
    async with rows.admitted():
        await rows.next()
        await asyncio.sleep(0.01)
    assert all(source.closed for source in sources)
    assert services.client.gate.num_requests == 0


@pytest.mark.parametrize("count", [1, 3])
async def test_cancellation_closes_every_row(services: Services, count: int) -> None:
    sources = [Source(10**6, delay=0.001) for _ in range(count)]
    task = asyncio.create_task(read_all(rows_of(services, sources)))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(source.closed for source in sources)


async def test_slow_reader_is_not_read_ahead_without_bound(services: Services) -> None:
    sources = [Source(10**6) for _ in range(3)]
    rows = rows_of(services, sources)
    async with rows.admitted():
        await rows.next()
        for _ in range(500):
            await asyncio.sleep(0)
        assert sum(source.produced for source in sources) <= QUEUE_SIZE + 2 * len(sources)


async def test_row_that_ends_early_is_broken_off_and_the_others_go_on(services: Services) -> None:
    """As after a stop string: what was read ahead of the ended row is not shown either."""
    sources = [Source(10**6, delay=0.0001), Source(50, delay=0.001)]
    rows, after = rows_of(services, sources), []
    async with rows.admitted():
        while not rows.is_over:
            number, event = await rows.next()
            if number == 0 and isinstance(event, TokenEvent):
                rows.end(0, "stop")
            elif isinstance(event, FinishEvent):
                assert sources[0].closed, "long before the answer has ended"
                rows.end(number, event.reason)
            after.append(number)
    assert sources[0].produced < 10**6
    assert after.count(0) == 2  # its prompt and the token that ended it
    assert sources[1].produced == 50


async def test_engine_learns_which_rows_are_answered(services: Services) -> None:
    """The others, which are broken off when the caller leaves, are not."""
    answered: list[str] = []
    rows = rows_of(services, [Source(1000, delay=0.001), Source(1000, delay=0.001)])
    services.client.answered = answered.append
    async with rows.admitted():
        await rows.next()
        rows.end(1, FinishReason.STOP)
    assert answered == ["r-1"]


async def test_rows_beyond_the_limit_wait_until_others_have_ended(services: Services) -> None:
    sources = [Source(3, delay=0.001) for _ in range(4)]
    rows = rows_of(services, sources)
    limited = Rows(services, rows.context, rows.model, rows.requests, max_in_flight=2)
    most = 0
    async with limited.admitted():
        while not limited.is_over:
            number, event = await limited.next()
            most = max(most, sum(source.produced > 0 and not source.closed for source in sources))
            if isinstance(event, FinishEvent):
                limited.end(number, event.reason)
    assert most == 2
    assert all(source.closed for source in sources)


async def test_rows_that_are_submitted_later_ask_for_what_answered_the_first(services: Services) -> None:
    rows = rows_of(services, [Source(1), Source(1)])
    asked: list[InferenceRequest] = []
    infer = services.client.infer

    def noted(request: InferenceRequest) -> AsyncIterator[Event]:
        asked.append(request)
        return _fallen_back(infer(request), is_first=len(asked) == 1)

    services.client.infer = noted
    requests = [replace(request, fallback=()) for request in rows.requests]
    fallback = AdapterSet((), "tiny-base")
    model = replace(rows.model, fallback=fallback)
    await read_all(Rows(services, rows.context, model, requests, max_in_flight=1))
    assert [request.fallback for request in asked] == [(), None]
    assert rows.context.fell_back is not None


async def _fallen_back(events: AsyncIterator[Event], is_first: bool) -> AsyncIterator[Event]:
    async for event in events:
        yield structs.replace(event, fell_back=True) if is_first and isinstance(event, PromptEvent) else event
