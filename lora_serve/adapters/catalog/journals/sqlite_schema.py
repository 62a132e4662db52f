"""The tables of a SQLite journal, and how those of older versions become these."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from lora_serve.adapters.stores.database import Schema

SCHEMA_VERSION = 3
MAX_CHANGES = 10_000  # generations that are remembered for those who follow
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


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables, or bring older ones up. Raises sqlite3.Error."""
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


# The cache is small, in KiB: the file is read once, at the start; all of it is in the snapshot.
SCHEMA = Schema(SCHEMA_VERSION, _prepare, ("cache_size = -512", "secure_delete = ON"))


def _records_of_schema_1(db: sqlite3.Connection) -> dict[str, str]:
    """lora_serve 0.1 kept a row per adapter and per version."""
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
