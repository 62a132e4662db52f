"""Records in a local SQLite file in WAL mode, every commit flushed to disk before it is acknowledged."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.sqlite_schema import MAX_CHANGES, SCHEMA
from lora_serve.adapters.stores.database import Database
from lora_serve.adapters.stores.monitor import StoreMonitor

_SAVE = "INSERT INTO records VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET text = excluded.text"


class SqliteJournal:
    """See Journal. One process at a time: the store's lock file sees to that (`stores/lock.py`)."""

    def __init__(self, path: Path, title: str = "adapter catalog", monitor: StoreMonitor | None = None) -> None:
        """Open or make the file. `title`: for messages. `monitor`: see Database.

        Raises ConfigError if it cannot be used, DamagedFileError if a page of it cannot be read.
        """
        self._db = Database(path, SCHEMA, title, monitor)
        self._floor = 0  # changes up to this generation are not known
        with self._db.checked():
            _check(self._db)

    def load(self) -> Page:
        """See Journal."""
        with self._db.transaction():
            return Page(self._position(), dict(self._db.execute("SELECT key, text FROM records")))

    def since(self, position: Position) -> Page | None:
        """See Journal."""
        with self._db.transaction():
            now = self._position()
            if now.epoch != position.epoch or now.generation < position.generation:
                return None
            changes = self._db.execute("SELECT key FROM changes WHERE generation > ?", (position.generation,))
            keys = {row[0] for row in changes}
            if now.generation - position.generation > MAX_CHANGES or position.generation < self._floor:
                return None
            return Page(now, {key: self._text(key) for key in keys})

    def commit(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        becomes: Position | None = None,
        heads: Mapping[str, int] | None = None,
    ) -> Position | None:
        """See Journal."""
        with self._db.transaction():
            if self._position() != expected:
                return None
            position = becomes or Position(expected.epoch or uuid.uuid4().hex, expected.generation + 1)
            self._write(position, changes)
            self._note(position.generation, changes)
            return position

    def wait(self, position: Position, seconds: float) -> None:
        """See Journal. Nobody else writes, so that there is nothing to wait for."""
        time.sleep(seconds)

    def forget(self) -> None:
        """See Journal."""
        with self._db.transaction():
            self._floor = self._position().generation
            self._db.execute("DELETE FROM changes")
        self._truncate()

    def close(self) -> None:
        """See Journal."""
        self._db.close()

    def _truncate(self) -> None:
        """Empty the write-ahead log, which has pages as they were; in the file itself they are overwritten."""
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:  # disk full: it is tried again with the next one
            raise self._db.unavailable(error) from None

    def _position(self) -> Position:
        return Position(*self._db.execute("SELECT epoch, generation, head FROM position").fetchone())

    def _text(self, key: str) -> str | None:
        row = self._db.execute("SELECT text FROM records WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _write(self, position: Position, changes: Mapping[str, str | None]) -> None:
        self._db.executemany("DELETE FROM records WHERE key = ?", [(k,) for k, text in changes.items() if text is None])
        self._db.executemany(_SAVE, [(key, text) for key, text in changes.items() if text is not None])
        self._db.execute("UPDATE position SET epoch = ?, generation = ?, head = ?", astuple(position))

    def _note(self, generation: int, keys: Iterable[str]) -> None:
        """Which records a commit changed."""
        self._db.executemany("INSERT INTO changes VALUES (?, ?)", [(generation, key) for key in keys])
        self._db.execute("DELETE FROM changes WHERE generation <= ?", (generation - MAX_CHANGES,))


def _check(db: Database) -> None:
    """Raises DamagedFileError, sqlite3.Error."""
    if len(db.execute("SELECT epoch, generation, head FROM position").fetchall()) != 1:
        raise db.damaged("its position is gone")
    for table in ("records", "changes", "heads"):
        db.execute(f"SELECT count(*) FROM {table}")  # noqa: S608 - names of ours
