"""This server's own sums of usage, in a file of its store.

A batch and its number are written in one transaction. So a batch that was written is never counted again, whether the
server died before or after it knew of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path

from lora_serve.adapters.stores.database import Database, Schema, made_by
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.tenancy.usage.figures import FIGURES, KEY_FIELDS, Batch, UsageFigures, UsageKey, UsageRow

FILE_NAME = "usage.sqlite3"
_VERSION = 2
_COLUMNS = ", ".join((*KEY_FIELDS, *FIGURES))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
  bucket INTEGER NOT NULL, {", ".join(f"{name} TEXT NOT NULL" for name in KEY_FIELDS)},
  {", ".join(f"{name} NOT NULL" for name in FIGURES)}, is_published INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, {", ".join(KEY_FIELDS)})
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_to_publish ON usage (is_published) WHERE is_published = 0;
CREATE TABLE IF NOT EXISTS last_batch (number INTEGER NOT NULL);
INSERT INTO last_batch SELECT 0 WHERE NOT EXISTS (SELECT * FROM last_batch);
CREATE TABLE IF NOT EXISTS last_receipt (receipt TEXT NOT NULL)
"""  # noqa: S608 - names of fields
_ADD = (
    f"INSERT INTO usage (bucket, {_COLUMNS}) VALUES ({', '.join('?' * (1 + len(KEY_FIELDS) + len(FIGURES)))}) "  # noqa: S608 - names of fields
    f"ON CONFLICT (bucket, {', '.join(KEY_FIELDS)}) DO UPDATE SET is_published = 0, "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in FIGURES)
)
_READABLE = " AND ".join((
    "typeof(bucket) = 'integer' AND bucket BETWEEN 0 AND 253402300799",  # in the year 9999
    *(f"typeof({name}) = 'text'" for name in KEY_FIELDS),
    *(f"typeof({name}) IN ('integer', 'real') AND {name} BETWEEN 0 AND 1e300" for name in FIGURES),
))  # fmt: skip
_SELECT = f"SELECT bucket, {_COLUMNS} FROM usage WHERE {_READABLE} AND "  # noqa: S608 - names of fields
_UNREADABLE = f"SELECT bucket, {', '.join(KEY_FIELDS)} FROM usage WHERE NOT ({_READABLE}) LIMIT 10"  # noqa: S608
_MAX_PAGE = 1000
_PRAGMAS = ("cache_size = -256",)  # KiB: it is appended to, and grows for ever
_TITLE = "usage journal"
_log = logging.getLogger(__name__)


class UsageJournal:
    """The file of this server's usage. May be called by any thread."""

    def __init__(self, store: Path, monitor: StoreMonitor | None = None) -> None:
        """Open or make the file in the store. `monitor`: see Database. Raises ConfigError, DamagedFileError."""
        self._database = Database(store / FILE_NAME, Schema(_VERSION, made_by(_SCHEMA), _PRAGMAS), _TITLE, monitor)
        self._lock = threading.Lock()
        with self._database.checked():
            found = self._database.execute("SELECT number FROM last_batch WHERE typeof(number) = 'integer'")
            if found.fetchone() is None:
                raise self._database.damaged("the number of its last batch is gone")
            self._database.execute("SELECT receipt FROM last_receipt").fetchone()
            if rows := self._database.execute(_UNREADABLE).fetchall():
                named = "; ".join(" ".join(map(str, row)) for row in rows)
                _log.error("usage journal: rows that cannot be read are in no sum: %s", named)

    @property
    def last_batch(self) -> int:
        """The number of the last batch that was written."""
        with self._lock:
            return int(self._database.execute("SELECT number FROM last_batch").fetchone()[0])

    def write(self, number: int, batch: Batch) -> bool:
        """Add a batch, durably; False: this one, or a later one, was written before. Raises AdapterUnavailableError."""
        rows = [(bucket, *astuple(key), *astuple(figures)) for (bucket, key), figures in batch.items()]
        with self._lock, self._database.transaction():
            if self._database.execute("SELECT number FROM last_batch").fetchone()[0] >= number:
                return False
            self._database.executemany(_ADD, rows)
            self._database.execute("UPDATE last_batch SET number = ?", (number,))
        return True

    def rows(self, start: int, end: int, tenant: str | None = None) -> list[UsageRow]:
        """Rows of the buckets from `start` up to, not including, `end` (Unix seconds); `tenant` None: all tenants'."""
        query = f"{_SELECT} bucket >= ? AND bucket < ? AND tenant = coalesce(?, tenant)"
        with self._lock:
            found = self._database.select(query, (start, end, tenant))
        return [_row(row) for row in found]

    def unpublished(self) -> list[UsageRow]:
        """Some rows that changed since they were published."""
        with self._lock:
            found = self._database.select(f"{_SELECT} is_published = 0 LIMIT {_MAX_PAGE}")
        return [_row(row) for row in found]

    def published(self, rows: Sequence[UsageRow], receipt: str) -> None:
        """Marks rows, unless they have changed since, as published with `receipt`. Raises AdapterUnavailableError."""
        marks = [(bucket, *astuple(key), *astuple(figures)) for bucket, key, figures in rows]
        same = " AND ".join(f"{name} = ?" for name in ("bucket", *KEY_FIELDS, *FIGURES))
        with self._lock, self._database.transaction():
            self._database.executemany(f"UPDATE usage SET is_published = 1 WHERE {same}", marks)  # noqa: S608
            self._database.execute("DELETE FROM last_receipt")
            self._database.execute("INSERT INTO last_receipt VALUES (?)", (receipt,))

    @property
    def last_receipt(self) -> str | None:
        """The receipt of the last publication; None: nothing was published yet."""
        with self._lock:
            found = self._database.select("SELECT receipt FROM last_receipt")
        return str(found[0][0]) if found else None

    def publish_again(self, start: int) -> None:
        """Marks the buckets from `start` on as not published. Raises AdapterUnavailableError."""
        with self._lock, self._database.transaction():
            self._database.execute("UPDATE usage SET is_published = 0 WHERE bucket >= ?", (start,))

    def forget(self, before: int) -> None:
        """Removes the buckets before `before`. Raises AdapterUnavailableError."""
        with self._lock, self._database.transaction():
            self._database.execute("DELETE FROM usage WHERE bucket < ?", (before,))

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _row(row: Sequence[object]) -> UsageRow:
    split = 1 + len(KEY_FIELDS)
    key = UsageKey(*map(str, row[1:split]))
    figures = UsageFigures(*row[split:])  # type: ignore[arg-type]
    return int(str(row[0])), key, figures


def rows_of(batch: Batch) -> Iterable[UsageRow]:
    """The rows of a batch."""
    return [(bucket, key, figures) for (bucket, key), figures in batch.items()]
