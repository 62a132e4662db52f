"""A SQLite file in WAL mode that only its owner may read, every commit flushed to disk before it is acknowledged.

On a disk that cannot be written now the file and its write-ahead log are read as they are, and changes are refused
until the store's monitor has opened the file for writing.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lora_serve.adapters.stores.files import FILE_MODE, UNWRITABLE, StoreMonitor, make_private, words_of
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, DamagedFileError, StoreUnwritableError

_UNWRITABLE = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN))
_DAMAGED = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
_text = functools.partial(str, encoding="utf-8", errors="replace")  # a text that is broken must not hide the others
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Schema:
    """`prepare` creates the tables of `version`, or migrates older ones."""

    version: int
    prepare: Callable[[sqlite3.Connection], None]
    pragmas: Sequence[str] = ()


class Database:
    """Used by one thread at a time, not always by the same."""

    def __init__(self, path: Path, schema: Schema, title: str, monitor: StoreMonitor | None = None) -> None:
        """Open or make the file. `title`: for messages. `monitor`: opens it for writing later if that fails now.

        Raises ConfigError if it cannot be used, DamagedFileError if a page of it cannot be read.
        """
        check_pages(path, title)
        self._path = path
        self._schema = schema
        self._title = title
        self._lock = threading.RLock()
        self._retired: list[sqlite3.Connection] = []
        self._problem: str | None = None  # why it can only be read
        with self._usable():
            try:
                self.connection = self._opened_for_writing()
            except (OSError, sqlite3.Error) as error:
                if not _is_unwritable(error):
                    raise
                self._problem = words_of(error)
                self.connection = self._opened_for_reading()
                _log.warning("the %s can only be read at present: %s", title, self._problem)
                if monitor is not None:
                    monitor.retry_when_writable(f"the {title}", self.open_for_writing)

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Raises sqlite3.Error."""
        return self.connection.execute(statement, values)

    def executemany(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Raises sqlite3.Error."""
        self.connection.executemany(statement, rows)

    def select(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """All rows. Raises AdapterUnavailableError."""
        try:
            return self.connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise AdapterUnavailableError(f"The {self._title} cannot be read at present: {error}.") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """An atomic change, durable at the end. Raises StoreUnwritableError: disk full, read-only, damaged."""
        try:
            with self._lock, self.connection:
                self.connection.execute("BEGIN IMMEDIATE" if self._problem is None else "BEGIN")
                yield
        except sqlite3.Error as error:
            raise self.unavailable(error) from None

    def unavailable(self, error: sqlite3.Error) -> StoreUnwritableError:
        """The exception for a failed change."""
        return StoreUnwritableError(f"The {self._title} cannot be written at present: {self._problem or error}.")

    def open_for_writing(self) -> None:
        """Open a file for writing that was opened for reading. Raises OSError, sqlite3.Error, ConfigError."""
        with self._lock:
            if self._problem is None:
                return
            connection = self._opened_for_writing()
            self._retired.append(self.connection)  # another thread may be reading
            self.connection, self._problem = connection, None

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Guards the first read: closes the file after an error; raises DamagedFileError in place of SQLite's."""
        try:
            yield
        except sqlite3.Error as error:
            self.close()
            raise self.damaged(error) from None
        except BaseException:
            self.close()
            raise

    def damaged(self, said: object) -> DamagedFileError:
        """The exception for an unreadable file."""
        return _damaged(self._path, self._title, said)

    def close(self) -> None:
        with self._lock:
            for connection in (self.connection, *self._retired):
                connection.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if _code_of(error) in _DAMAGED:
                raise self.damaged(error) from None
            named = f"--store {self._path.parent}: {self._path.name}, the {self._title}, cannot be used"
            raise ConfigError(f"{named}: {words_of(error)}") from None

    def _opened_for_writing(self) -> sqlite3.Connection:
        make_private(self._path.parent)
        _make_file(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _opened_for_reading(self) -> sqlite3.Connection:
        """Opens the file as it is; older tables as a migrated copy in memory; no file as an empty one."""
        found = _connected_for_reading(self._path)
        try:
            if found.execute("PRAGMA user_version").fetchone()[0] == self._schema.version:
                return found
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            found.backup(copy)
            found.close()
            found = copy
            self._prepare(found)
            found.execute("PRAGMA query_only = ON")
        except BaseException:
            found.close()
            raise
        return found

    def _prepare(self, connection: sqlite3.Connection) -> None:
        for pragma in self._schema.pragmas:
            connection.execute(f"PRAGMA {pragma}")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > self._schema.version:
            place = f"--store {self._path.parent}"
            raise ConfigError(f"{place}: {self._path.name} was made by a newer lora_serve (schema {found}).")
        if found < self._schema.version:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._schema.prepare(connection)
                connection.execute(f"PRAGMA user_version = {self._schema.version}")


def check_pages(path: Path, title: str) -> None:
    """Check every page of a file that is not open, as a damaged file may look as if records had been deleted.

    Raises DamagedFileError.
    """
    if not path.is_file():
        return
    try:
        with closing(_connected_for_reading(path)) as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(1)")]
    except (OSError, sqlite3.Error) as error:
        if _code_of(error) not in _DAMAGED:
            return  # opening it fails likewise
        raise _damaged(path, title, error) from None
    if found != ["ok"]:
        raise _damaged(path, title, found[0] if found else "no pages")


def _damaged(path: Path, title: str, said: object) -> DamagedFileError:
    reason = " ".join(str(said).split()).strip(". *")
    named = f"--store {path.parent}: {path.name}, the {title}, is damaged"
    return DamagedFileError(f"{named} ({reason}); restore it from a backup, or move it away", reason)


def made_by(script: str) -> Callable[[sqlite3.Connection], None]:
    """The `prepare` of a schema whose statements also work on older tables."""

    def prepare(connection: sqlite3.Connection) -> None:
        for statement in script.strip().split(";\n"):
            connection.execute(statement)

    return prepare


def _make_file(path: Path) -> None:
    """Creates the file. Raises OSError, also for anything but a regular file."""
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ENOENT, "a link that leads nowhere")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file")
    finally:
        os.close(descriptor)


def _connected_for_reading(path: Path) -> sqlite3.Connection:
    """Opens the file without writing a byte. The store's lock keeps writers away, so SQLite's locks are not needed,
    which the file system may refuse.

    If there is a write-ahead log its index is made in memory, for which SQLite needs the file for itself; otherwise a
    file in WAL mode can only be opened as immutable.
    """
    if not path.exists() or not path.stat().st_size:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    has_log = path.with_name(f"{path.name}-wal").exists()
    how = "vfs=unix-none" if has_log else "immutable=1"
    address = f"file:{quote(str(path.absolute()))}?mode=ro&{how}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    connection.text_factory = _text
    if has_log:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _is_unwritable(error: OSError | sqlite3.Error) -> bool:
    return error.errno in UNWRITABLE if isinstance(error, OSError) else _code_of(error) in _UNWRITABLE


def _code_of(error: Exception) -> int | None:
    """SQLite's primary result code."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF
