"""Tests whether the store folder can be written, and retries failed writes once it can.

The test writes into the folder every few seconds, so that it covers a full disk, a quota, a read-only file system and
missing rights alike, and a server that starts on such a disk recovers like one whose disk becomes so.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lora_serve.core.errors import LoraServeError, StoreUnwritableError

INTERVAL = 5.0  # seconds between two tests of a writable folder
FIRST_PAUSE, MAX_PAUSE = 1.0, 10.0  # seconds between two tests of an unwritable one; doubled each time
TRIED_BYTES = 64 * 2**10  # a commit of a database writes at least this
RESERVE, RESERVE_BYTES = "reserve", 2**19
_log = logging.getLogger(__name__)


class StoreMonitor:
    """One for each store folder. Every method may be called from any thread."""

    def __init__(self, store: Path) -> None:
        """Nothing is tried before the first `test`."""
        self._store = store
        self._lock = threading.Lock()
        self._pending: dict[str, Callable[[], None]] = {}  # by description
        self._problem: str | None = None
        self._kept_again_from = 0.0  # `time.monotonic()`: until then what needed the reserve's room may be at work
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store monitor", daemon=True)

    @property
    def problem(self) -> str | None:
        """The reason why the store cannot be written, without paths; None: it can, as far as known."""
        return self._problem

    def retry_when_writable(self, what: str, write: Callable[[], None]) -> None:
        """Note that `what` could not be written, and call `write` later, until it raises no OSError, sqlite3.Error or
        LoraServeError. Until then the store counts as unwritable.
        """
        self._pending[what] = write

    def test(self) -> bool:
        """Test the store now; returns True if it can be written and no failed write is left."""
        with self._lock:
            self._note(self._try())
            return self._problem is None

    def check(self, makes_room: bool = False) -> None:
        """Raises StoreUnwritableError if the store cannot be written, after another test. A change that `makes_room` is
        let through, also in the first moments of a full disk: the reserve is given up for its records.
        """
        if makes_room and self._is_short() and self._gave_up_reserve():
            return
        if self._problem is not None and not self.test():
            if makes_room and self._gave_up_reserve():
                return
            raise StoreUnwritableError(f"No changes are taken at present: {self._problem}.", retry_after=MAX_PAUSE)

    def _is_short(self) -> bool:
        """True if a record might not fit any more, whether or not a write has failed yet."""
        with suppress(OSError):
            return shutil.disk_usage(self._store).free < RESERVE_BYTES
        return False

    def _gave_up_reserve(self) -> bool:
        """True if there is room now for what makes more; a server that started on a full disk opens its databases."""
        with self._lock, suppress(OSError):  # a disk that is read-only, or it was given up a moment ago
            (self._store / RESERVE).unlink()
            self._kept_again_from = time.monotonic() + MAX_PAUSE
            self._write_pending()
        return self._kept_again_from > 0

    def start(self) -> None:
        """Test the store regularly, on a thread, until `close`."""
        self._test_and_reserve()
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(MAX_PAUSE)  # a disk that hangs must not delay the end

    def _run(self) -> None:
        pause, next_pause = INTERVAL, FIRST_PAUSE
        while not self._stopping.wait(pause):
            try:
                is_well = self._test_and_reserve()
            except Exception:
                _log.exception("the store's monitor met a bug and goes on")
                is_well = True
            pause = INTERVAL if is_well else next_pause
            next_pause = FIRST_PAUSE if is_well else min(MAX_PAUSE, 2 * next_pause)

    def _test_and_reserve(self) -> bool:
        is_well = self.test()
        if is_well:
            with suppress(OSError):  # there is no room for it yet
                _keep_reserve(self._store)
        return is_well

    def _try(self) -> str | None:
        """The problem, or None."""
        try:
            write_and_drop(self._store)
            if self._kept_again_from:  # the reserve was given up: only once it is kept again is there room for others
                if time.monotonic() < self._kept_again_from:
                    raise OSError(errno.ENOSPC, "")
                _keep_reserve(self._store)
                self._kept_again_from = 0.0
        except OSError as error:
            return f"the store cannot be written: {words_of(error)}"
        return self._write_pending()

    def _write_pending(self) -> str | None:
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
    """Write a temporary file into the folder. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(TRIED_BYTES))


def _keep_reserve(folder: Path) -> None:
    """Keep room for the records of a deletion, which a full disk would refuse otherwise. Raises OSError."""
    path = folder / RESERVE
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            os.link(file.name, path)


def words_of(error: Exception) -> str:
    """The error's message without the path."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error)
