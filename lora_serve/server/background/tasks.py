"""Work that outlives the request which asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from lora_serve.core.errors import RequestError

logger = logging.getLogger(__name__)
RESUME_SECONDS = 1.0
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """Something to be called without arguments."""

    def __call__(self) -> T_co: ...


async def kept_going(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Work for as long as the server runs: a bug in it is logged, and it is begun again. Otherwise nobody would notice
    that, say, no deleted adapter is freed any more.
    """
    while True:
        try:
            await work()
            return
        except Exception:
            logger.exception("%s failed; it is begun again", name)
        await asyncio.sleep(RESUME_SECONDS)


class BackgroundTasks:
    """Tasks that are held until they end, so that none is lost; failures are logged."""

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
