"""The registrations under way: how far each has come, and the transfers of their files from a source into a private
folder, a few at once.

A slow download holds a thread of its own, never one of the registry's. One tenant's downloads never hold all of them.
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.sources.base import no_progress
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.core.errors import NotReadyError, StoreUnwritableError
from lora_serve.server.background.tasks import FairThreads

NUM_TRANSFERS = 4  # at once; more wait their turn
_CLOSING = "The server is shutting down."


class Stage(enum.StrEnum):
    """The steps of a registration, in their order."""

    RECEIVING = "receiving"  # an upload's bytes
    FETCHING = "fetching"  # a source's bytes
    EXAMINING = "examining"  # files, names, shapes and values; before that it waits for its tenant's turn
    PROBING = "probing"  # a forward pass with the adapter; then it is pinned, where that is asked for


@dataclass(slots=True, eq=False)
class Progress:
    """One registration; written by the thread that works on it, read by any."""

    id: str
    scope: str | None  # the tenant that registers; None: somebody who sees all
    stage: Stage
    num_bytes: int = 0  # that came so far
    total_bytes: int | None = None  # None: not known
    started: float = field(default_factory=time.time)  # Unix seconds

    def receive(self, num_bytes: int) -> None:
        """Note how many bytes came in all."""
        self.num_bytes = num_bytes

    def examine(self) -> None:
        """Note that all files are here."""
        self.stage = Stage.EXAMINING

    def probe(self) -> None:
        """Note that the files are found right."""
        self.stage = Stage.PROBING


class Registering:
    """All that are under way; changed on the event loop."""

    def __init__(self) -> None:
        self._all: Counter[Progress] = Counter()  # how many blocks work on each

    @contextmanager
    def listed(self, progress: Progress) -> Iterator[None]:
        """Lists a registration until the block ends, and every other block for it: the request's may end first."""
        self._all[progress] += 1
        try:
            yield
        finally:
            self._all[progress] -= 1
            if not self._all[progress]:
                del self._all[progress]

    def seen_by(self, scope: str | None, since: float = 0.0) -> list[Progress]:
        """Those that a tenant began (None: all), the oldest first. `since`: when the tenant was made, in Unix seconds;
        what began before was begun by another one of that name.
        """
        return [one for one in self._all if scope is None or (one.scope == scope and one.started >= since)]


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

    async def stage(self, source: str, tenant: str = "", progress: Callable[[int], None] = no_progress) -> Staged:
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

    def _fetch(self, source: str, progress: Callable[[int], None]) -> Staged:
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
