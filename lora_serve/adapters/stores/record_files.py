"""The records beside a blob on disk: `named-<key>.json` is a record, `gone-<key>.json` the tombstone of a removed one.

They are no part of the blob's digest and move with its folder. The catalog writes and reads their content.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.regular_file import NotRegularError, TooLargeFileError, read_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush, make_private, remove_folder

MAX_BYTES = 2**26  # of one record
Texts = Mapping[str, str]  # by key
RECORD = re.compile(r"named-([0-9a-f]{32})\.json\Z")
TOMBSTONE = re.compile(r"gone-([0-9a-f]{32})\.json\Z")


def is_record(name: str) -> bool:
    """True if a file in a blob's folder is a record or a tombstone."""
    return bool(RECORD.match(name) or TOMBSTONE.match(name))


def read_records(blob: Path, kind: re.Pattern[str] = RECORD) -> dict[str, str]:
    """The texts by key; an unreadable one is empty. Raises OSError."""
    found = {}
    for path in blob.iterdir():
        if named := kind.match(path.name):
            with suppress(FileNotFoundError):  # it was replaced or removed meanwhile
                found[named[1]] = _text(path)
    return found


def _text(path: Path) -> str:
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8", "replace")
    except (NotRegularError, TooLargeFileError):  # no server put it there
        return ""


def record_path(folder: Path, key: str) -> Path:
    """The place of a record."""
    return folder / f"named-{key}.json"


def write_record(path: Path, text: str) -> None:
    """Write a record as a new file, which is still to be flushed. Raises OSError."""
    path.touch(FILE_MODE)
    path.write_text(text, encoding="utf-8")


def remove_record(blob: Path, key: str, tombstone: bool) -> None:
    """Remove a record, if there is one; needs no room on the disk. Raises OSError."""
    path, trace = record_path(blob, key), blob / f"gone-{key}.json"
    with suppress(FileNotFoundError):
        if tombstone:
            path.rename(trace)
        else:
            trace.unlink(missing_ok=True)
            path.unlink()
        flush(blob)


@contextmanager
def staged_records(
    tmp: Path, blob_of: Callable[[str], Path], records: Mapping[str, Texts]
) -> Iterator[Callable[[], None]]:
    """Write the records durably into `tmp`; the yielded function moves them beside their blobs, which needs no room.

    `records`: by digest. Missing blobs are skipped. Raises OSError.
    """
    texts = {record_path(blob_of(digest), key): text for digest, own in records.items() for key, text in own.items()}
    files = {place: make_private(tmp) / uuid.uuid4().hex for place in texts}
    try:
        for place, file in files.items():
            write_record(file, texts[place])
        for file in files.values():  # once all are there: see DiskStore
            flush(file)

        def publish() -> None:
            for place, file in files.items():
                with suppress(FileNotFoundError):
                    file.rename(place)
            for blob in {place.parent for place in files}:
                with suppress(FileNotFoundError):
                    flush(blob)

        yield publish
    finally:
        for file in files.values():
            with suppress(OSError):  # the next sweep removes it
                if file.exists():
                    file.unlink()


_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{1,12})-[0-9]+\Z")
_DAY = 86400.0
_FIRST_TIME = 1_767_225_600  # 2026-01-01, Unix seconds: before it there was no such folder, and the clock was not set
_log = logging.getLogger(__name__)


class OrphanedBlobs:
    """The folder of the orphans, which is made for the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, blob: Path) -> None:
        """Move a blob's folder here, as it is. Raises OSError."""
        make_private(self.folder)
        target = self._stamped(blob, blob.name)
        _log.warning("blob %s is named by no catalog; it is kept in %s", blob.name, target)

    def all(self) -> Iterator[tuple[str, Path]]:
        """The digests with their folders; a digest may occur more than once. Raises OSError."""
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                if named := _NAME.match(path.name):
                    yield "sha256:" + named[1], path

    def drop(self, digests: Collection[str]) -> None:
        """Remove the orphans of these digests, which are in use again. Raises OSError."""
        for digest, path in list(self.all()):
            if digest in digests:
                remove_folder(path)

    def expire(self, days: float) -> None:
        """Remove orphans older than `days`; 0: none. The days of one begin anew if its time, which a wrong clock gave,
        cannot be right. Raises OSError.
        """
        if not days:
            return
        now = time.time()
        for digest, path in list(self.all()):
            name, stamp, _ = path.name.split("-")
            if not _FIRST_TIME <= int(stamp) <= now:
                self._stamped(path, name)
            elif now - int(stamp) > days * _DAY:
                _log.warning("blob %s was named by no catalog for %g days and is removed", digest, days)
                remove_folder(path)

    def _stamped(self, folder: Path, name: str) -> Path:
        """Where the folder is once it is renamed to this name and the present time."""
        now, number = int(time.time()), 0
        while (target := self.folder / f"{name}-{now}-{number}").exists():
            number += 1
        folder.rename(target)
        flush(self.folder)
        return target
