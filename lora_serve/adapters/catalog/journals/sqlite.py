"""Records in a local SQLite file in WAL mode, every commit flushed to disk before it is acknowledged."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.stores.database import Database, Schema
from lora_serve.adapters.stores.files import StoreMonitor

SCHEMA_VERSION = 3
MAX_CHANGES = 10_000  # generations that are kept for followers
_SCHEMA = """
CREATE TABLE records (key TEXT PRIMARY KEY, text TEXT NOT NULL) STRICT;
CREATE TABLE changes (generation INTEGER NOT NULL, key TEXT NOT NULL) STRICT;
CREATE INDEX changes_by_generation ON changes (generation);
CREATE TABLE position (epoch TEXT NOT NULL, generation INTEGER NOT NULL) STRICT;
INSERT INTO position VALUES ('', 0);
"""
_LINEAGE = """
ALTER TABLE position ADD COLUMN head TEXT NOT NULL DEFAULT '';
CREATE TABLE heads (head TEXT PRIMARY KEY, generation INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""
_ADAPTERS = "SELECT name, tenant, pinned, created, metadata, default_version, last_version FROM adapters"
_VERSIONS = """
SELECT name, version, digest, rank, num_bytes, summary, source, created FROM versions ORDER BY name, version
"""
_SAVE = "INSERT INTO records VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET text = excluded.text"


def _prepare(db: sqlite3.Connection) -> None:
    """Creates the tables, or migrates older ones. Raises sqlite3.Error."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found < 2:
        _make_tables(db, _records_of_schema_1(db) if found == 1 else {})
    for table in ("versions", "adapters", "strays") if found == 1 else ():
        db.execute(f"DROP TABLE {table}")
    for statement in _LINEAGE.strip().split(";\n"):
        db.execute(statement)


def _make_tables(db: sqlite3.Connection, records: Mapping[str, str]) -> None:
    for statement in _SCHEMA.strip().split(";\n"):
        db.execute(statement)
    db.executemany("INSERT INTO records VALUES (?, ?)", list(records.items()))
    if records:
        db.execute("UPDATE position SET epoch = lower(hex(randomblob(16))), generation = 1")


# A small cache (in KiB), as the file is read only once, at the start.
SCHEMA = Schema(SCHEMA_VERSION, _prepare, ("cache_size = -512", "secure_delete = ON"))


def _records_of_schema_1(db: sqlite3.Connection) -> dict[str, str]:
    """The records of lora_serve 0.1, which had a row per adapter and per version."""
    adapters = {row[0]: row for row in db.execute(_ADAPTERS)}
    records = {}
    for name, rows in groupby(db.execute(_VERSIONS).fetchall(), key=lambda row: row[0]):
        records[f"adapter:{name}"] = json.dumps(_document_of_schema_1(adapters[name], [row[1:] for row in rows]))
    for (digest,) in db.execute("SELECT digest FROM strays"):
        records[f"blob:{digest}"] = json.dumps({"holders": {"schema-1": 0.0}, "condemned": False})
    return records


def _document_of_schema_1(adapter: tuple[Any, ...], versions: list[tuple[Any, ...]]) -> dict[str, Any]:
    name, tenant, pinned, created, metadata, default, last = adapter
    keys = ("version", "digest", "rank", "num_bytes", "summary", "source", "created")
    table = [dict(zip(keys, row, strict=True)) for row in versions]
    for version in table:
        version["summary"] = json.loads(version["summary"])
    return {
        "name": name,
        "tenant": tenant,
        "pinned": bool(pinned),
        "created": created,
        "metadata": json.loads(metadata),
        "last_version": max(last, table[-1]["version"]),
        "route": {"version": default, "canary": None, "history": []},
        "versions": table,
    }


class SqliteJournal:
    """See Journal. For one process at a time, which the store's lock file ensures (`stores/files.py`)."""

    def __init__(self, path: Path, title: str = "adapter catalog", monitor: StoreMonitor | None = None) -> None:
        """Open or make the file. `title`: names it in messages. `monitor`: see Database.

        Raises ConfigError if it cannot be used, DamagedFileError if a page of it cannot be read.
        """
        self._db = Database(path, SCHEMA, title, monitor)
        self._floor = 0  # changes up to this generation are forgotten
        with self._db.checked():
            _check(self._db)

    def load(self) -> Page:
        with self._db.transaction():
            return Page(self._position(), dict(self._db.execute("SELECT key, text FROM records")))

    def since(self, position: Position) -> Page | None:
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
        with self._db.transaction():
            if self._position() != expected:
                return None
            position = becomes or Position(expected.epoch or uuid.uuid4().hex, expected.generation + 1)
            self._write(position, changes)
            self._note(position.generation, changes)
            return position

    def wait(self, position: Position, seconds: float) -> None:
        time.sleep(seconds)  # nobody else writes

    def forget(self) -> None:
        with self._db.transaction():
            self._floor = self._position().generation
            self._db.execute("DELETE FROM changes")
        self._truncate()

    def close(self) -> None:
        self._db.close()

    def _truncate(self) -> None:
        """Empties the write-ahead log, which has pages as they were; in the file itself they are overwritten."""
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
        """Notes which records a commit changed."""
        self._db.executemany("INSERT INTO changes VALUES (?, ?)", [(generation, key) for key in keys])
        self._db.execute("DELETE FROM changes WHERE generation <= ?", (generation - MAX_CHANGES,))


def _check(db: Database) -> None:
    """Raises DamagedFileError, sqlite3.Error."""
    if len(db.execute("SELECT epoch, generation, head FROM position").fetchall()) != 1:
        raise db.damaged("its position is gone")
    for table in ("records", "changes", "heads"):
        db.execute(f"SELECT count(*) FROM {table}")  # noqa: S608 - names of ours
