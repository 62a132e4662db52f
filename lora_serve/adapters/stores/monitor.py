"""Whether the store folder can be written now, and what is made up for once it can again.

The folder is tried every few seconds by writing into it, whatever it is that may stand against it: a full disk, a
quota, a read-only file system, rights. So a server that starts on such a disk, and one whose disk becomes so, are in
the same state, and leave it in the same way.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from lora_serve.core.errors import LoraServeError, StoreUnwritableError

INTERVAL = 5.0  # seconds between two tries of a folder that can be written
FIRST_PAUSE, MAX_PAUSE = 1.0, 10.0  # seconds between two tries of one that cannot: each is twice the one before
TRIED_BYTES = 64 * 2**10  # what a commit of a database writes at least
_log = logging.getLogger(__name__)


class StoreMonitor:
    """One for each store folder. Every method may be called from any thread."""

    def __init__(self, store: Path) -> None:
        """Nothing is tried before the first `look`."""
        self._store = store
        self._lock = threading.Lock()
        self._pending: dict[str, Callable[[], None]] = {}  # by what it is, in words
        self._problem: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store monitor", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why the store cannot be written, in words without paths; None: it can, as far as is known."""
        return self._problem

    def retry_when_writable(self, what: str, write: Callable[[], None]) -> None:
        """`what` could not be written, so the store counts as one that cannot. `settle` makes up for it once there is
        room; until it can it raises OSError, sqlite3.Error or LoraServeError, and is called again.
        """
        self._pending[what] = write

    def look(self) -> bool:
        """Try it now: whether the store can be written, and nothing is owed any more."""
        with self._lock:
            self._note(self._try())
            return self._problem is None

    def check(self) -> None:
        """Raises StoreUnwritableError if the store cannot be written: it is tried again first."""
        if self._problem is not None and not self.look():
            raise StoreUnwritableError(f"No changes are taken at present: {self._problem}.", retry_after=MAX_PAUSE)

    def start(self) -> None:
        """Keep looking, on a thread, until `close`."""
        self.look()
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(MAX_PAUSE)  # a disk that hangs holds up no end

    def _run(self) -> None:
        pause, hindered = INTERVAL, FIRST_PAUSE
        while not self._stopping.wait(pause):
            try:
                is_well = self.look()
            except Exception:
                _log.exception("the store's monitor met a bug and goes on")
                is_well = True
            pause = INTERVAL if is_well else hindered
            hindered = FIRST_PAUSE if is_well else min(MAX_PAUSE, 2 * hindered)

    def _try(self) -> str | None:
        """What stands against it; None: nothing."""
        try:
            write_and_drop(self._store)
        except OSError as error:
            return f"the store cannot be written: {words_of(error)}"
        for what in list(self._pending):
            try:
                self._pending[what]()
            except (OSError, sqlite3.Error, LoraServeError) as error:
                return f"the store cannot be written ({what}): {words_of(error)}"
            del self._pending[what]
        return None

    def _note(self, problem: str | None) -> None:
        before, self._problem = self._problem, problem
        if problem is not None and before is None:
            _log.error("%s; what is there is served, changes are refused until it can", problem)
        elif problem is None and before is not None:
            _log.warning("the store can be written again; changes are taken")


def write_and_drop(folder: Path) -> None:
    """Write a file without a name into the folder. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(TRIED_BYTES))


def words_of(error: Exception) -> str:
    """What went wrong, without the path."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error)
