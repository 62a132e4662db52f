"""The files of a backup: copies of databases and blobs, and a list of them.

`backup.json` is written last, once the backup is complete. Restoring reads nothing that the list does not name.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.mirrored import Mirror
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.opening import CATALOG_NAME
from lora_serve.adapters.checkpoint.content import file_sha256
from lora_serve.adapters.regular_file import read_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush
from lora_serve.core.errors import ConfigError
from lora_serve.core.strict_json import parse_json

MAX_LIST_BYTES = 2**28
LIST_NAME, MARK = "backup.json", "backup.incomplete"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class BackupList:
    """The content of `backup.json`. `databases`: SHA-256 in hex by file name; `position`: the catalog's. `missing`:
    digests of blobs that were broken or gone at the source, with the `id@version` labels that name them.
    """

    taken: float  # Unix seconds
    position: Position
    databases: Mapping[str, str]
    digests: tuple[str, ...]
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def copy_database(source: Path, target: Path) -> None:
    """Copy a database, which may be in use, as it is at one moment. Raises sqlite3.Error, OSError."""
    _make_anew(target)
    address = f"{source.resolve().as_uri()}?mode=rw"
    with closing(sqlite3.connect(address, uri=True)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
        found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(1)")]
        if found != ["ok"]:
            raise sqlite3.DatabaseError(f"{source.name} is damaged: {found[:1]}")
        copy.execute("PRAGMA journal_mode = DELETE")
    flush(target)


def write_journal(page: Page, target: Path) -> None:
    """Write the page of a shared journal as a database. Raises ConfigError, AdapterUnavailableError, OSError."""
    _make_anew(target)
    with closing(Mirror(target)) as journal:
        journal.replace(page)
    flush(target)


def read_journal(path: Path) -> Page:
    """Raises ConfigError, AdapterUnavailableError."""
    with closing(SqliteJournal(path)) as journal:
        return journal.load()


def write_list(
    folder: Path,
    taken: float,
    page: Page,
    databases: list[str],
    digests: frozenset[str],
    missing: Mapping[str, tuple[str, ...]],
) -> BackupList:
    """Write the list, which completes the backup. Raises OSError."""
    folder = folder.resolve()  # the folder may be a link, its files may not
    listed = BackupList(
        taken,
        page.position,
        {name: file_sha256(folder / name).hex() for name in databases},
        tuple(sorted(digests)),
        missing,
    )
    fields = {
        "format": FORMAT,
        "taken": taken,
        "epoch": page.position.epoch,
        "generation": page.position.generation,
        "databases": dict(listed.databases),
        "blobs": list(listed.digests),
        "missing": {digest: list(labels) for digest, labels in missing.items()},
    }
    made = folder / f"{LIST_NAME}.new"
    made.touch(FILE_MODE)
    made.write_text(json.dumps(fields, indent=1))
    flush(made)
    made.rename(folder / LIST_NAME)
    (folder / MARK).unlink(missing_ok=True)
    flush(folder)
    return listed


def read_list(folder: Path, flag: str) -> BackupList:
    """The list of a complete backup whose databases have the listed digests. Raises ConfigError."""
    folder = folder.resolve()
    try:
        fields = parse_json(read_regular(folder / LIST_NAME, MAX_LIST_BYTES))
        if fields["format"] != FORMAT:
            raise ConfigError(f"{flag} {folder}: a backup of another version of lora_serve.")
        listed = BackupList(
            float(fields["taken"]),
            Position(str(fields["epoch"]), int(fields["generation"])),
            {str(name): str(digest) for name, digest in fields["databases"].items()},
            tuple(map(str, fields["blobs"])),
            {str(digest): tuple(map(str, labels)) for digest, labels in fields.get("missing", {}).items()},
        )
        bad = [
            name for name, digest in listed.databases.items() if file_sha256(folder / _checked(name)).hex() != digest
        ]
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: no complete backup: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{flag} {folder}: its {LIST_NAME} makes no sense: {error!r}") from None
    if bad or CATALOG_NAME not in listed.databases:
        raise ConfigError(f"{flag} {folder}: {(bad or [CATALOG_NAME])[0]} is not the file that was written.")
    return listed


def _checked(name: str) -> str:
    if os.sep in name or not name.endswith(".sqlite3"):
        raise ValueError(name)
    return name


def _make_anew(path: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    path.touch(FILE_MODE)
