"""Work that is done on a thread if it is long: for work in Python itself, which lets the event loop in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG = 8_000  # characters, token ids, or values; above this the event loop would be held up too long

T = TypeVar("T")


async def beside(length: int, work: Callable[[], T]) -> T:
    """What `work` gives. `length`: in the units of LONG."""
    return await asyncio.to_thread(work) if length > LONG else work()
