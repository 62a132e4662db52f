"""Transfers of adapter files from a source into a private folder, a few at once.

A slow download holds a thread of its own, never one of the registry's. One tenant's downloads never hold all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.sources.base import Progress, no_progress
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.core.errors import NotReadyError, StoreUnwritableError
from lora_serve.server.background.fair_threads import FairThreads

NUM_TRANSFERS = 4  # at once; more wait their turn
_CLOSING = "The server is shutting down."


@dataclass(frozen=True, slots=True)
class Staged:
    """Files that are ready to be registered. Their holder removes `folder`, or hands it to the registry."""

    folder: Path
    source: str  # as the card says it


class Staging:
    """The transfers under way, on threads of their own."""

    def __init__(self, sources: SourceTable, new_folder: Callable[[], Path], max_bytes: int) -> None:
        """`new_folder`: makes a private folder; may raise OSError. `max_bytes`: the limit for one adapter's files."""
        self._sources = sources
        self._new_folder = new_folder
        self._max_bytes = max_bytes
        self._threads = FairThreads("staging", NUM_TRANSFERS, each=NUM_TRANSFERS - 1)
        self._closing = threading.Event()

    async def stage(self, source: str, tenant: str = "", progress: Progress = no_progress) -> Staged:
        """The files that `source` names, for `tenant`. `progress`: told the bytes that came, on another thread. Raises
        what `SourceTable.fetch` does, RateLimitedError, NotReadyError after `close`.

        After an error nothing stays behind, nor if the caller is cancelled meanwhile.
        """
        future = self._threads.submit(lambda: self._fetch(source, progress), tenant)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_discard)
            raise

    def close(self) -> None:
        """Break the transfers off; they end at their next bytes, or after their own timeout."""
        self._closing.set()
        self._threads.close(wait=False)

    def _fetch(self, source: str, progress: Progress) -> Staged:
        try:
            folder = self._new_folder()
        except OSError as error:
            raise StoreUnwritableError(f"The store cannot be written at present: {words_of(error)}.") from None

        def came(num_bytes: int) -> None:
            if self._closing.is_set():
                raise NotReadyError(_CLOSING)
            progress(num_bytes)

        return Staged(folder, self._sources.fetch(source, folder, self._max_bytes, came))


def _discard(future: Future[Staged]) -> None:
    if not future.cancelled() and future.exception() is None:
        remove_folder(future.result().folder)
