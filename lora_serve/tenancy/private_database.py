"""A SQLite file in WAL mode that only its owner may read, every commit flushed before it is acknowledged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.stores.files import FILE_MODE, make_private
from lora_serve.core.errors import AdapterUnavailableError, ConfigError


def open_database(path: Path, schema: str, version: int) -> sqlite3.Connection:
    """Open or make the file. Used by one thread at a time, not always by the same. Raises ConfigError."""
    try:
        make_private(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--store {path.parent}: {path.name} cannot be used: {error}") from None
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA cache_size = -256")  # KiB: it is appended to, and grows for ever
        _prepare(database, path, schema, version)
    except sqlite3.Error as error:
        database.close()
        raise ConfigError(f"--store {path.parent}: {path.name} cannot be used: {error}") from None
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path, schema: str, version: int) -> None:
    found = database.execute("PRAGMA user_version").fetchone()[0]
    if found > version:
        raise ConfigError(f"--store {path.parent}: {path.name} was made by a newer lora_serve (schema {found}).")
    if found == version:
        return
    with database:
        database.execute("BEGIN IMMEDIATE")
        for statement in schema.strip().split(";\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {version}")


@contextmanager
def transaction(database: sqlite3.Connection, what: str) -> Iterator[None]:
    """All of it or nothing, durable at the end. Raises AdapterUnavailableError: disk full, read-only, damaged."""
    try:
        with database:
            database.execute("BEGIN IMMEDIATE")
            yield
    except sqlite3.Error as error:
        raise AdapterUnavailableError(f"{what} cannot be written at present: {error}.") from None
