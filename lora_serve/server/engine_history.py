"""The lives of the engine since this server began: how each was warmed up, and why the last one ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_RESTARTS = 100  # that are told


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
