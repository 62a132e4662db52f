"""Engines that are killed now and then, and come back."""

from __future__ import annotations

import asyncio
import signal
import time

from benchmarks.fleet.engines import engines_below, is_alive, signal_to
from benchmarks.fleet.status import num_serving
from benchmarks.soak.traffic import Break
from lora_serve.commands.server_process import ServerProcess

EVERY = 40.0  # seconds from one kill to the next
PATIENCE = 120.0  # seconds until all engines must be there again
POLL = 0.2


async def kill_engines(process: ServerProcess, breaks: list[Break], until: float) -> None:
    """kill -9 of the engine that has lived longest, until a moment of the clock. Of an engine on a thread: nothing.

    Raises TimeoutError if the engines are not all there again in time.
    """
    number = len(await _engines(process))
    while number and time.monotonic() + EVERY / 2 < until:
        await asyncio.sleep(EVERY / 2)
        oldest = (await _engines(process))[0]
        breaks.append(Break(time.monotonic()))
        signal_to(oldest, signal.SIGKILL)
        await _until_whole(process, oldest, number)
        breaks[-1].until = time.monotonic()
        await asyncio.sleep(EVERY / 2)


async def _until_whole(process: ServerProcess, killed: int, number: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if not is_alive(killed) and len(await _engines(process)) == number and await _serve_all(process, number):
                return
            await asyncio.sleep(POLL)


async def _serve_all(process: ServerProcess, number: int) -> bool:
    """True if the server is ready and, where it has several engines, sends requests to each of them."""
    is_ready = await asyncio.to_thread(process.is_ready)
    return is_ready and (number == 1 or await asyncio.to_thread(num_serving, process.url) == number)


async def _engines(process: ServerProcess) -> list[int]:
    return await asyncio.to_thread(engines_below, [process.pid])
