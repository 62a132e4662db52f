"""The catalog's SQL: STORE/catalog.sqlite3 in WAL mode, every commit flushed to disk before it is acknowledged."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any

from lora_serve.adapters.stores.files import FILE_MODE, make_private
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

SCHEMA_VERSION = 1
_SCHEMA = """
BEGIN;
CREATE TABLE adapters (
    name TEXT PRIMARY KEY, tenant TEXT NOT NULL, pinned INTEGER NOT NULL, created REAL NOT NULL,
    metadata TEXT NOT NULL, default_version INTEGER NOT NULL, last_version INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE versions (
    name TEXT NOT NULL REFERENCES adapters (name) ON DELETE CASCADE, version INTEGER NOT NULL, digest TEXT NOT NULL,
    rank INTEGER NOT NULL, num_bytes INTEGER NOT NULL, summary TEXT NOT NULL, source TEXT NOT NULL,
    created REAL NOT NULL, PRIMARY KEY (name, version), UNIQUE (name, digest)
) STRICT;
CREATE TABLE strays (digest TEXT PRIMARY KEY) STRICT;
PRAGMA user_version = 1;
COMMIT;
"""
_ADAPTERS = "SELECT name, tenant, pinned, created, metadata, default_version FROM adapters"
_VERSIONS = """
SELECT name, version, digest, rank, num_bytes, summary, source, created FROM versions ORDER BY name, version
"""
_SAVE = """
INSERT INTO adapters (name, tenant, pinned, created, metadata, default_version) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET pinned = excluded.pinned, metadata = excluded.metadata,
    default_version = excluded.default_version
"""
_ADD_VERSION = "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_REMOVE_VERSION = "DELETE FROM versions WHERE name = ? AND version = ?"
_NOTE_STRAY = "INSERT OR IGNORE INTO strays VALUES (?)"
_FORGET_STRAY = "DELETE FROM strays WHERE digest = ?"
_COUNT_VERSION = "UPDATE adapters SET last_version = ? WHERE name = ?"


class CatalogDb:
    """Rows in, rows out. One server per store: a lock file says so."""

    def __init__(self, store: Path) -> None:
        """Raises ConfigError if the store cannot be used."""
        try:
            make_private(store)
            self._lock = _lock(store / "lock")
        except OSError as error:
            raise ConfigError(f"--store {store}: the folder cannot be used: {error}") from None
        try:
            self._db = _connect(store / "catalog.sqlite3")
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise ConfigError(f"--store {store}: the adapter catalog cannot be used: {error}") from None
        except ConfigError:
            self._lock.close()
            raise

    def rows(self) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
        """(adapter row, its version rows oldest first) for each adapter that has a version."""
        adapters = {row[0]: row for row in self._db.execute(_ADAPTERS)}
        versions = self._db.execute(_VERSIONS)
        for name, rows in groupby(versions, key=lambda row: row[0]):
            yield adapters[name], [row[1:] for row in rows]

    def next_version(self, name: str) -> int:
        """One more than the largest number ever given under this name since it was last made."""
        row = self._db.execute("SELECT last_version FROM adapters WHERE name = ?", (name,)).fetchone()
        return int(row[0]) + 1 if row else 1

    def save(self, adapter: Sequence[Any], version: Sequence[Any] | None) -> None:
        """Insert or update an adapter's row and, if given, add a version: (name, version, digest, ...)."""
        with self._transaction():
            self._db.execute(_SAVE, adapter)
            if version is not None:
                self._db.execute(_ADD_VERSION, version)
                self._db.execute(_COUNT_VERSION, (version[1], version[0]))
                self._db.execute(_FORGET_STRAY, (version[2],))

    def remove(self, name: str, left: Sequence[Any] | None, versions: Sequence[int], strays: Sequence[str]) -> None:
        """Remove some versions, and the adapter itself if `left`, its new row, is None; note `strays`."""
        with self._transaction():
            self._db.executemany(_NOTE_STRAY, [(digest,) for digest in strays])
            if left is None:
                self._db.execute("DELETE FROM adapters WHERE name = ?", (name,))
            else:
                self._db.execute(_SAVE, left)
                self._db.executemany(_REMOVE_VERSION, [(name, version) for version in versions])

    def note_stray(self, digest: str) -> None:
        """See Catalog.note_stray."""
        with self._transaction():
            self._db.execute(_NOTE_STRAY, (digest,))

    def strays(self) -> frozenset[str]:
        """See Catalog.strays."""
        return frozenset(row[0] for row in self._db.execute("SELECT digest FROM strays"))

    def forget_stray(self, digest: str) -> None:
        """See Catalog.forget_stray."""
        with self._transaction():
            self._db.execute(_FORGET_STRAY, (digest,))

    def close(self) -> None:
        """Close the database, then let the lock go. May be called twice."""
        self._db.close()
        self._lock.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:  # disk full, read-only file system, damaged file
            raise AdapterUnavailableError(f"The adapter catalog cannot be written at present: {error}.") from None


def _lock(path: Path) -> FileIO:
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"--store {path.parent}: another server is using this store.") from None
    return file


def _connect(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    # Written by one thread only, but not necessarily the one that opens it.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA_VERSION:
        db.close()
        raise ConfigError(f"--store {path.parent}: its catalog was made by a newer lora_serve (schema {found}).")
    if found == 0:
        db.executescript(_SCHEMA)
    return db
