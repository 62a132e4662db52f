"""The server's state, which decides whether requests are taken, and the number of those that run."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lora_serve.core.errors import NotReadyError

RETRY_AFTER = 5.0  # seconds


class ServerState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    """The state and the count. Changed by the wiring only, on the event loop's thread."""

    def __init__(self) -> None:
        self.state = ServerState.STARTING
        self.reason = "The server is warming up."
        self.num_inside = 0
        self.engine_since = time.monotonic()  # when the engine's start began
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self) -> None:
        """Warm-up is done. Nothing happens unless the server was starting."""
        if self.state is ServerState.STARTING:
            self.state, self.reason = ServerState.READY, ""

    def restarting(self) -> None:
        """The engine is lost and another one is being started. A server that drains does so all the same."""
        self.engine_since = time.monotonic()
        if self.state is ServerState.READY:
            self.state = ServerState.STARTING
        if self.state is ServerState.STARTING:
            self.reason = "The engine is being restarted."

    def fail(self, reason: str) -> None:
        """The engine is dead; /health says so, and nothing is let in. `reason` is shown to callers."""
        self.state, self.reason = ServerState.FAILED, reason

    async def drain(self, timeout: float) -> bool:
        """Take no more requests and wait for those that run, at most `timeout` seconds. Returns whether all ended."""
        if self.state is not ServerState.FAILED:
            self.state, self.reason = ServerState.DRAINING, "The server is shutting down."
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count one inference request for as long as the block lasts. Raises NotReadyError."""
        if self.state is not ServerState.READY:
            raise NotReadyError(self.reason, retry_after=RETRY_AFTER)
        self.num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._idle.set()


MAX_RESTARTS = 100  # that are shown


@dataclass(frozen=True, slots=True)
class WarmUpStage:
    """A part of the last warm-up."""

    name: str
    seconds: float


@dataclass(slots=True)
class EngineRestart:
    """The end of one life, and how long requests had to wait for the next."""

    time: float  # Unix seconds
    reason: str
    seconds: float | None = None  # until the server was ready again; None: not yet


class EngineHistory:
    """Written by the wiring, on the event loop's thread; in memory only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self.started = clock()
        self.ready_since: float | None = None
        self.stages: list[WarmUpStage] = []
        self.restarts: deque[EngineRestart] = deque(maxlen=MAX_RESTARTS)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one part of a warm-up; one that failed is not kept."""
        start = time.perf_counter()
        yield
        self.stages.append(WarmUpStage(name, time.perf_counter() - start))

    def ready(self) -> None:
        """The engine is warm."""
        self.ready_since = self._clock()
        if self.restarts and self.restarts[-1].seconds is None:
            self.restarts[-1].seconds = self.ready_since - self.restarts[-1].time

    def lost(self, reason: str) -> None:
        """The engine's life ended; another one begins."""
        self.ready_since = None
        self.stages.clear()
        self.restarts.append(EngineRestart(self._clock(), reason))
