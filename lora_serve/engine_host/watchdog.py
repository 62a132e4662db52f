"""Sees that the engine gets on: it is asked again and again, and has to answer between two steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

_TICK = 1.0  # seconds
_MAX_PAUSE = 5.0  # seconds between an answer and the next question


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
