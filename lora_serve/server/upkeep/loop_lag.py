"""The event loop's lag: how long every request waits when something holds up the loop, or Python.

A probe asks to be called a little later, over and over. One call that is late by a second stands for all the calls
that would have been due meanwhile, so the figures are those of a request that comes at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from lora_serve.server.background.tasks import running
from lora_serve.server.services import SERVICES

INTERVAL = 0.05  # seconds between two calls
MAX_SAMPLES = 1000  # for one late call


async def probing(app: web.Application) -> AsyncIterator[None]:
    """Put the lag into the metrics while the application runs."""
    observe = app[SERVICES].metrics.loop_lag.observe
    async with running(lambda: probe(observe), name="measuring the event loop's lag"):
        yield


async def probe(observe: Callable[[float], None], interval: float = INTERVAL) -> None:
    """Call `observe` with the lag in seconds, again and again."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        for lag in samples(loop.time() - due, interval):
            observe(lag)


def samples(lag: float, interval: float) -> list[float]:
    """The lag of a late call, and of each call that would have been due while it was late."""
    count = min(MAX_SAMPLES, 1 + max(0, int(lag / interval)))
    return [max(0.0, lag - number * interval) for number in range(count)]
