"""Keeps an engine running: started, made ready, watched, and started again when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from lora_serve.core.errors import EngineLostError, ModelError
from lora_serve.engine_host.base import EngineHost, HostedModel
from lora_serve.engine_host.restarts import Restarts
from lora_serve.engine_host.watchdog import until_hung
from lora_serve.server.lifecycle import Lifecycle

_log = logging.getLogger(__name__)
_GRACE = 1.0  # seconds in which the end of an engine shows after what it made fail


class Supervisor:
    """Runs on the event loop."""

    def __init__(
        self,
        host: EngineHost,
        lifecycle: Lifecycle,
        restarts: Restarts,
        step_timeout: float,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """`step_timeout`: seconds without progress after which the engine counts as hung; 0: any number. `count`:
        called at each restart.
        """
        self._count = count
        self._host = host
        self._lifecycle = lifecycle
        self._restarts = restarts
        self._step_timeout = step_timeout

    async def run(
        self, start: Callable[[], Awaitable[None]], prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]
    ) -> str:
        """`start`, `prepare` and `ready`, in each of the engine's lives. Why there is none any more.

        Raises what `start` and `prepare` raise, unless the engine's end was the cause.
        """
        while True:
            reason = await self._life(start, prepare, ready)
            self._lifecycle.restarting()
            delay = self._restarts.next_delay() if self._host.can_restart else None
            if delay is None:
                return reason
            _log.warning("the engine is started again in %.1f s (%s)", delay, reason)
            self._count()
            await asyncio.sleep(delay)

    async def _life(
        self, start: Callable[[], Awaitable[None]], prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]
    ) -> str:
        try:
            await start()
        except EngineLostError as error:
            return str(error)
        lost: asyncio.Task[str] = _task(self._host.lost())
        hung = _task(until_hung(self._host.ping, self._step_timeout))
        work = _task(self._prepared(prepare, ready))
        try:
            await asyncio.wait({lost, hung, work}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            return await self._end(lost, hung, work)
        finally:
            await _cancelled(lost, hung, work)

    async def _end(self, lost: asyncio.Task[str], hung: asyncio.Task[None], work: asyncio.Task[None]) -> str:
        """One of `hung` and `work` is over before the engine was lost; if they failed, it may be about to be."""
        ended = hung if hung.done() else work
        if ended.exception() is not None:
            await asyncio.wait({lost}, timeout=_GRACE)
            if not lost.done():
                ended.result()
            return lost.result()
        reason = f"it made no progress for {self._step_timeout:g} s"
        _log.error("the engine hangs: %s", reason)
        self._host.kill(reason)
        if self._host.can_restart:
            await lost
        return reason

    async def _prepared(self, prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]) -> None:
        """Goes on for ever."""
        await prepare()
        ready()
        await asyncio.Event().wait()


async def load_patiently(host: EngineHost, restarts: Restarts) -> HostedModel:
    """The model, though the engine may be lost while it loads. Raises ModelError, ConfigError."""
    while True:
        try:
            return await host.load()
        except EngineLostError as error:
            delay = restarts.next_delay()
            if delay is None:
                raise ModelError(f"The engine cannot be started: {error}") from None
            _log.warning("%s It is started again in %.1f s.", error, delay)
            await asyncio.sleep(delay)


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
