"""Several async generators as one, with every one of them closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

QUEUE_SIZE = 64  # items read ahead; a slow reader then slows the generators' readers, not the engine


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (source number, item) as items come. The first error ends all and is raised."""
    if len(sources) == 1:  # the common case needs no tasks
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue(QUEUE_SIZE)
    tasks = [asyncio.create_task(_pump(number, source, queue)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """A source ended, well or badly."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _pump(number: int, source: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | _End]) -> None:
    end = _End()
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((number, item))
    except Exception as error:
        end = _End(error)
    await queue.put(end)
