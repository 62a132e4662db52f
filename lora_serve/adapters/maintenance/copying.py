"""Copies of blobs, each verified on its way, and of databases; and the list of a backup's files."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.mirrored import Mirror
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.opening import CATALOG_NAME
from lora_serve.adapters.checkpoint.content import adapter_digest, check_sizes, content_names, file_sha256
from lora_serve.adapters.maintenance.registries import NotCopyableError, is_readable
from lora_serve.adapters.regular_file import open_regular, pieces_of, read_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.files import FILE_MODE, flush, scratch_folder
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.strict_json import parse_json

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; the second is an estimate at first
MAX_LIST_BYTES = 2**28
LIST_NAME, MARK = "backup.json", "backup.incomplete"
FORMAT = 1


class BlobCopier:
    """`num_blobs` and `num_bytes` count what was copied so far."""

    def __init__(
        self,
        source: AdapterStore,
        target: AdapterStore,
        tmp: Path,
        num_bytes: Mapping[str, int],
        on_progress: OnProgress,
    ) -> None:
        """`tmp`: a private folder beside the target. `num_bytes`: an estimate for each digest."""
        self._source, self._target, self._tmp = source, target, tmp
        self._ahead = dict(num_bytes)  # blobs that are neither copied nor skipped yet
        self._left = sum(self._ahead.values())
        self._done = 0
        self._on_progress = on_progress
        self._verified: set[str] = set()
        self.num_blobs = self.num_bytes = 0

    def is_there(self, digest: str, is_quick: bool) -> bool:
        """True if the target has the blob and, unless `is_quick`, all its bytes are right."""
        if not self._target.has(digest):
            return False
        if not is_quick and digest not in self._verified:
            if not is_readable(self._target, digest):
                return False
            self._verified.add(digest)
        return True

    def copy(self, digest: str) -> None:
        """Replaces a broken copy in the target. Raises NotCopyableError if the source's bytes are not what `digest`
        names, AdapterUnavailableError if source or target fails.
        """
        with scratch_folder(self._tmp) as scratch:
            num_bytes = self._fetch(digest, scratch)
            if self._target.has(digest):
                self._target.delete(digest)
            self._target.put(digest, scratch)
        self._verified.add(digest)
        self.num_blobs, self.num_bytes = self.num_blobs + 1, self.num_bytes + num_bytes

    def pass_over(self, digest: str) -> None:
        """Count the blob as done: it was copied, or need not be."""
        self._advance(self._ahead.pop(digest, 0))

    def forget(self, digest: str) -> None:
        """Note that the target no longer has the blob."""
        self._verified.discard(digest)

    def _fetch(self, digest: str, scratch: Path) -> int:
        try:
            with self._source.open(digest) as folder:
                num_bytes = self._copy_files(digest, folder, scratch)
            if adapter_digest(scratch) != digest:
                raise NotCopyableError(f"the source's blob {digest} is corrupt")
        except AdapterUnavailableError:
            self._source.has(digest)  # raises if it is the whole store that is away
            raise NotCopyableError(f"the source's blob {digest} cannot be read") from None
        except OSError as error:
            raise AdapterUnavailableError(f"A blob cannot be copied: {error.strerror or error}.") from None
        return num_bytes

    def _copy_files(self, digest: str, folder: Path, scratch: Path) -> int:
        names = content_names(folder)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise NotCopyableError(f"the source's blob {digest} is corrupt: it lacks {missing[0]}")
        try:
            check_sizes(folder)
        except OSError as error:
            raise NotCopyableError(f"the source's blob {digest} is corrupt: {error.strerror}") from None
        num_bytes = sum((folder / name).stat().st_size for name in names)
        self._left += num_bytes - self._ahead.pop(digest, 0)
        for name in names:
            with (scratch / name).open("wb") as file:
                for chunk in _chunks(folder / name):
                    file.write(chunk)
                    self._advance(len(chunk))
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._left -= num_bytes
        self._on_progress(self._done, self._done + self._left)


def _chunks(path: Path) -> Iterator[bytes]:
    """Raises NotCopyableError for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            yield from pieces_of(file)
    except OSError as error:
        raise NotCopyableError(f"the source's {path.name} cannot be read: {error.strerror}") from None


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
