"""Keeps an engine running: started, made ready, watched, and started again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.errors import EngineLostError, ModelError
from lora_serve.engine_host.hosts import EngineHost, LoadedEngine
from lora_serve.server.lifecycle import Lifecycle

_log = logging.getLogger(__name__)
WINDOW = 600.0  # seconds
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds; the first restart comes at once, each further one twice as late
END_SECONDS = 30.0  # within which a killed engine is gone, unless it never will be
LEAST_LOAD_SECONDS = 600.0  # that any load may take; beyond that, LOAD_FACTOR times as long as the first one took
LOAD_FACTOR = 10
_GRACE = 1.0  # seconds in which the end of an engine shows after a failure that it caused
_TICK = 1.0  # seconds
_MAX_PAUSE = 5.0  # seconds between a reply to a ping and the next ping


@dataclass
class Restarts:
    """Counts restarts: at most `limit` within WINDOW."""

    limit: int
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=deque)

    def next_delay(self) -> float | None:
        """Counts one more restart and returns the seconds to wait before it; None: there were too many."""
        now = self.clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        self._times.append(now)
        number = len(self._times)
        return 0.0 if number == 1 else min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (number - 2))


class _CannotEndError(Exception):
    """A killed engine that stays."""


@dataclass(frozen=True)
class Supervisor:
    """Starts, watches and restarts one engine, on the event loop."""

    _host: EngineHost
    _lifecycle: Lifecycle
    _restarts: Restarts
    _step_timeout: float  # seconds without progress after which the engine counts as hung; 0: any number
    _note: Callable[[str], None] = lambda reason: None  # called at each restart
    _load_timeout: float | None = None  # seconds after which the start of an engine counts as hung

    async def run(
        self, start: Callable[[], Awaitable[None]], prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]
    ) -> str:
        """Calls `start`, `prepare` and `ready` in each of the engine's lives. Returns why there is no further life.

        Raises the errors of `start` and `prepare`, unless the engine's end was the cause.
        """
        while True:
            try:
                reason = await self._life(start, prepare, ready)
            except _CannotEndError as error:
                return str(error)
            self._lifecycle.restarting()
            delay = self._restarts.next_delay() if self._host.can_restart else None
            if delay is None:
                return reason
            _log.warning("the engine is started again in %.1f s (%s)", delay, reason)
            self._note(reason)
            await asyncio.sleep(delay)

    async def _life(
        self, start: Callable[[], Awaitable[None]], prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]
    ) -> str:
        try:
            await self._started(start)
        except EngineLostError as error:
            return str(error)
        lost = asyncio.create_task(self._host.lost())
        hung = asyncio.create_task(until_hung(self._host.ping, self._step_timeout))
        work = asyncio.create_task(self._prepared(prepare, ready))
        try:
            await asyncio.wait({lost, hung, work}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            return await self._end(lost, hung, work)
        finally:
            await _cancelled(lost, hung, work)

    async def _started(self, start: Callable[[], Awaitable[None]]) -> None:
        """Raises EngineLostError if the engine was lost, or ended because it took too long."""
        starting = asyncio.ensure_future(start())
        try:
            await asyncio.wait({starting}, timeout=self._load_timeout)
            if not starting.done():
                reason = f"it was not loaded within {self._load_timeout:g} s"
                await self._kill(reason, starting)
                starting.exception()  # expected
                raise EngineLostError(reason)
            starting.result()
        finally:
            starting.cancel()

    async def _end(self, lost: asyncio.Task[str], hung: asyncio.Task[None], work: asyncio.Task[None]) -> str:
        """One of `hung` and `work` is over before the engine was lost; if they failed, it may be about to be."""
        ended = hung if hung.done() else work
        if ended.exception() is not None:
            await asyncio.wait({lost}, timeout=_GRACE)
            if not lost.done():
                ended.result()
            return lost.result()
        reason = f"it made no progress for {self._step_timeout:g} s"
        await self._kill(reason, lost)
        return reason

    async def _kill(self, reason: str, gone: asyncio.Future[Any]) -> None:
        """Ends an engine that hangs, so that `gone` is done. Raises _CannotEndError."""
        _log.error("the engine hangs: %s", reason)
        self._lifecycle.restarting()
        self._host.kill(reason)
        if not self._host.can_restart:
            return
        await asyncio.wait({gone}, timeout=END_SECONDS)
        if not gone.done():
            raise _CannotEndError(f"{reason}, and was still there {END_SECONDS:g} s after it was killed")

    async def _prepared(self, prepare: Callable[[], Awaitable[None]], ready: Callable[[], None]) -> None:
        """Goes on for ever."""
        await prepare()
        ready()
        await asyncio.Event().wait()


async def load_patiently(host: EngineHost, restarts: Restarts) -> LoadedEngine:
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


def load_timeout(first_load: float) -> float:
    """The seconds that a later load may take, if the first one took `first_load`."""
    return max(LEAST_LOAD_SECONDS, LOAD_FACTOR * first_load)


async def until_hung(ping: Callable[[], Awaitable[None]], timeout: float) -> None:
    """Returns once a question was not answered for `timeout` seconds; with 0 never. Raises what `ping` raises.

    The seconds are counted one by one: if this process was stopped for a minute, that is one.
    """
    if timeout <= 0:
        await asyncio.Event().wait()
    tick = min(_TICK, timeout / 4)
    while True:
        question = asyncio.ensure_future(ping())
        try:
            for _ in range(math.ceil(timeout / tick)):
                await asyncio.wait({question}, timeout=tick)
                if question.done():
                    break
            else:
                return
            question.result()
        finally:
            question.cancel()
        await asyncio.sleep(min(_MAX_PAUSE, timeout / 4))


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
