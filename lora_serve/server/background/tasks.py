"""Work beside the event loop's handlers: on threads, after the request that asked for it, or for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from lora_serve.core.errors import RequestError

logger = logging.getLogger(__name__)
RESUME_SECONDS = 1.0
LONG = 8_000  # characters, token ids, or values: work on more would hold up the event loop too long
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """Something to be called without arguments."""

    def __call__(self) -> T_co: ...


async def kept_going(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Work for as long as the server runs: an exception is logged, and the work begun again. Otherwise nobody would
    notice that, say, no deleted adapter is freed any more.
    """
    while True:
        try:
            await work()
            return
        except Exception:
            logger.exception("%s failed; it is begun again", name)
        await asyncio.sleep(RESUME_SECONDS)


@asynccontextmanager
async def running(*works: Callable[[], Awaitable[None]], name: str) -> AsyncIterator[None]:
    """Each of `works` is kept going in a task of its own for as long as the block lasts. `name`: of the tasks."""
    tasks = [asyncio.create_task(kept_going(work, name), name=name) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BackgroundTasks:
    """Tasks that outlive their request. They are held until they end, so that none is lost; failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run `work` to its end even if the caller is cancelled meanwhile (its client has left)."""
        return await asyncio.shield(self.start(work, name))

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for the tasks, `timeout` seconds at most; then cancel them."""
        if self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=timeout)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RequestError):  # callers hear of their own mistakes
            logger.warning("%s failed: %r", task.get_name(), error)
