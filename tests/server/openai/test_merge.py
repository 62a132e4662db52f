"""Many generators as one: nothing lost, nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from lora_serve.server.openai.merge import QUEUE_SIZE, merge


class Source:
    """Counts up to `count`, then raises if told to; remembers whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None, delay: float = 0.0) -> None:
        self.count, self.error, self.delay = count, error, delay
        self.produced = 0
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(self.delay)
                self.produced += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_item_comes_once_and_in_its_sources_order(count: int) -> None:
    sources = [Source(10 * number, delay=0.0001) for number in range(1, count + 1)]
    found: dict[int, list[int]] = {}
    async for number, item in merge([source.items() for source in sources]):
        found.setdefault(number, []).append(item)
    assert found == {number: list(range(source.count)) for number, source in enumerate(sources)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_first_error_is_raised_and_every_source_closed(count: int) -> None:
    sources = [Source(1, KeyError("mine")), *(Source(10**6, delay=0.001) for _ in range(count - 1))]
    with pytest.raises(KeyError, match="mine"):
        async for _ in merge([source.items() for source in sources]):
            pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_closes_every_source(count: int) -> None:
    sources = [Source(10**6) for _ in range(count)]
    async with aclosing(merge([source.items() for source in sources])) as items:
        await anext(items)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancellation_closes_every_source(count: int) -> None:
    sources = [Source(10**6, delay=0.001) for _ in range(count)]

    async def consume() -> None:
        async with aclosing(merge([source.items() for source in sources])) as items:
            async for _ in items:
                pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert all(source.closed for source in sources)


async def test_slow_reader_is_not_read_ahead_without_bound() -> None:
    sources = [Source(10**6) for _ in range(3)]
    async with aclosing(merge([source.items() for source in sources])) as items:
        await anext(items)
        for _ in range(500):
            await asyncio.sleep(0)
        assert sum(source.produced for source in sources) <= QUEUE_SIZE + 2 * len(sources)
