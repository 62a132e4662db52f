"""How late the event loop calls what is due: what every request waits whenever something keeps the loop, or Python.

A probe asks to be called a little later, over and over. One call that is late by a second stands for all the calls
that would have been due meanwhile, so the figures are what somebody meets who comes at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from lora_serve.server.background.tasks import kept_going
from lora_serve.server.services import SERVICES

INTERVAL = 0.02  # seconds between two calls
MAX_SAMPLES = 1000  # for one late call


async def probing(app: web.Application) -> AsyncIterator[None]:
    """While the application runs: the lag goes into its metrics."""
    observe = app[SERVICES].metrics.loop_lag.observe
    task = asyncio.create_task(kept_going(lambda: probe(observe), "measuring the event loop's lag"), name="loop lag")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def probe(observe: Callable[[float], None], interval: float = INTERVAL) -> None:
    """Calls `observe` with seconds, without end."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        for lag in samples(loop.time() - due, interval):
            observe(lag)


def samples(lag: float, interval: float) -> list[float]:
    """The lag, and that of each call which would have been due while it lasted."""
    count = min(MAX_SAMPLES, 1 + max(0, int(lag / interval)))
    return [max(0.0, lag - number * interval) for number in range(count)]
