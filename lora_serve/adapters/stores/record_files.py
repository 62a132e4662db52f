"""The records beside a blob on disk: `named-<key>.json` is a record, `gone-<key>.json` the tombstone of a removed one.

They are no part of the blob's digest and move with its folder. The catalog writes and reads their content.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.regular_file import NotRegularError, TooLargeFileError, read_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush, make_private

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
