"""The records beside a blob on disk: `named-<key>.json` is a record, `gone-<key>.json` the tombstone of a removed one.

They are no part of the blob's digest and move with its folder. The catalog writes and reads their content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.regular_file import NotRegularError, TooLargeFileError, read_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush, scratch_folder

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


def write_record(folder: Path, key: str, text: str) -> Path:
    """Write a record as a new file, which is still to be flushed. Raises OSError."""
    path = folder / f"named-{key}.json"
    path.touch(FILE_MODE)
    path.write_text(text, encoding="utf-8")
    return path


def remove_record(blob: Path, key: str, tombstone: bool) -> None:
    """Remove a record, if there is one; needs no room on the disk. Raises OSError."""
    path, trace = blob / f"named-{key}.json", blob / f"gone-{key}.json"
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
    if not any(records.values()):
        yield lambda: None
        return
    with scratch_folder(tmp) as scratch:
        files: dict[str, list[Path]] = {}
        for digest, texts in records.items():
            place = scratch / digest.removeprefix("sha256:")
            place.mkdir()
            files[digest] = [write_record(place, key, text) for key, text in texts.items()]
        for path in (path for paths in files.values() for path in paths):  # once all are there: see DiskStore
            flush(path)

        def publish() -> None:
            for digest, paths in files.items():
                with suppress(FileNotFoundError):
                    for path in paths:
                        path.rename(blob_of(digest) / path.name)
            for digest in files:
                with suppress(FileNotFoundError):
                    flush(blob_of(digest))

        yield publish
