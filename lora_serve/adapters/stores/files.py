"""A store's folder: private and durable files, its lock, and the monitor that tests whether it can be written."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from lora_serve.adapters.regular_file import link_regular
from lora_serve.core.errors import ConfigError, LoraServeError, StoreUnwritableError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
# Errors that say that nothing can be written now, and nothing about the file itself.
UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM))
INTERVAL = 5.0  # seconds between two tests of a writable folder
FIRST_PAUSE, MAX_PAUSE = 1.0, 10.0  # seconds between two tests of an unwritable one; doubled each time
TRIED_BYTES = 64 * 2**10  # a commit of a database writes at least this
RESERVE, RESERVE_BYTES = "reserve", 2**19
_log = logging.getLogger(__name__)


def make_private(folder: Path) -> Path:
    """The folder, made with its parents if need be, durably, readable by its owner only. Raises OSError."""
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)) from None
    for made in missing:
        with suppress(PermissionError):  # a parent that this user may change and not read
            flush(made.parent)
    try:
        if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
            folder.chmod(FOLDER_MODE)
    except OSError as error:
        if error.errno not in UNWRITABLE:  # a folder of another owner, or on a read-only disk, stays as it is
            raise
    return folder


def private_or_later(folder: Path) -> Path:
    """`make_private`, left to the first writer if nothing can be made now. Raises OSError."""
    try:
        return make_private(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return folder


def listed(folder: Path) -> list[Path]:
    """The paths in a folder; none if it does not exist. Raises OSError."""
    return list(folder.iterdir()) if folder.is_dir() else []


def read_small_file(path: Path, max_bytes: int = 2**16) -> bytes:
    """The content of a file. Raises OSError, also for anything but a regular file, or one that is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, "larger than it may be")
    return content


def new_folder(parent: Path, prefix: str = "") -> Path:
    """A fresh private folder of a random name in `parent`. Raises OSError."""
    folder = make_private(parent) / f"{prefix}{uuid.uuid4().hex}"
    folder.mkdir(mode=FOLDER_MODE)
    return folder


@contextmanager
def scratch_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """A fresh private folder that is gone afterwards."""
    folder = new_folder(parent, prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, or a file in its place; what cannot be removed is left to the next sweep."""
    if folder.is_symlink() or folder.is_file():
        with suppress(OSError):
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """`target` gets `source`'s content, durable once it is flushed. Raises OSError."""
    link_regular(source, target)
    target.chmod(FILE_MODE)


def flush(path: Path) -> None:
    """fsync a file or a folder (whose entries then survive a crash). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreLock:
    """Held until `close`."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = list(descriptors)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def lock_store(store: Path) -> StoreLock:
    """Lock the folder. Raises ConfigError if another process has it, or if it is unusable.

    The folder itself is locked too, as a disk that cannot be written may have no lock file.
    """
    try:
        make_private(store)
        found = [*_lock_file(store), os.open(store, os.O_RDONLY | os.O_CLOEXEC)]
    except OSError as error:
        raise ConfigError(f"--store {store}: the folder cannot be used: {error}") from None
    lock, num_held = StoreLock(*found), 0
    for descriptor in found:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_held += 1
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"--store {store}: another server is using this store.") from None
        except OSError:  # a network file system may lock files only
            continue
    if not num_held:
        lock.close()
        raise ConfigError(f"--store {store}: this file system cannot lock the folder, nor can a file be made in it.")
    return lock


def _lock_file(store: Path) -> list[int]:
    """The open lock file; empty if there is none and none can be made now. Raises OSError."""
    path, flags = store / "lock", os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return [_checked(os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE))]
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return [_checked(os.open(path, os.O_RDONLY | flags))] if path.exists() else []


def _checked(descriptor: int) -> int:
    """The descriptor of a regular file; anything else is closed. Raises OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "lock is not a file; move it away")
    return descriptor


class StoreMonitor:
    """Tests whether the store's folder can be written, and retries failed writes once it can. One for each folder.

    The test writes into the folder every few seconds, so that it covers a full disk, a quota, a read-only file system
    and missing rights alike, and a server that starts on such a disk recovers like one whose disk becomes so. Every
    method may be called from any thread.
    """

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
