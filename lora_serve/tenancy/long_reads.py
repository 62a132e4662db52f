"""Reads that may take seconds, on threads of their own: those of the event loop's executor are for acts, whose callers
wait for a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from lora_serve.core.errors import NotReadyError
from lora_serve.core.process import PatientThreads

_MAX_READS = 2  # at a time; the processor's time that they take is the event loop's, too
T = TypeVar("T")


class LongReads:
    """Used on the event loop's thread. A read whose caller leaves before its turn is not begun."""

    def __init__(self, title: str) -> None:
        """`title`: names the threads."""
        self._threads = PatientThreads(_MAX_READS, f"long-reads-{title}")

    async def run(self, read: Callable[[], T]) -> T:
        """Calls `read` once it has a thread. Raises what it raises, and NotReadyError if the system gives no thread, or
        after `close`.
        """
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, read)
        except RuntimeError:
            raise NotReadyError("There is no thread to read this with at present; try again.", retry_after=1) from None
        return await future

    def close(self) -> None:
        """Begins no further read; returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
