"""Records beside a blob on disk: `named-<key>.json` is one that counts, `gone-<key>.json` the trace of one that did.

They are no part of the blob's digest and go wherever its folder goes. What they say is the catalog's affair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.regular_file import NotRegularError, TooLargeFileError, read_regular
from lora_serve.adapters.stores.files import FILE_MODE, flush, scratch_folder

MAX_BYTES = 2**26  # of one
Texts = Mapping[str, str]  # by key
RECORD = re.compile(r"named-([0-9a-f]{32})\.json\Z")
TOMBSTONE = re.compile(r"gone-([0-9a-f]{32})\.json\Z")


def is_record(name: str) -> bool:
    """Whether a file in a blob's folder is a record, or the trace of one."""
    return bool(RECORD.match(name) or TOMBSTONE.match(name))


def read_records(blob: Path, kind: re.Pattern[str] = RECORD) -> dict[str, str]:
    """Texts by key; one that cannot be read as text is empty. Raises OSError."""
    found = {}
    for path in blob.iterdir():
        if named := kind.match(path.name):
            with suppress(FileNotFoundError):  # it was replaced or taken away meanwhile
                found[named[1]] = _text(path)
    return found


def _text(path: Path) -> str:
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8", "replace")
    except (NotRegularError, TooLargeFileError):  # nobody of us put it there
        return ""


def write_record(folder: Path, key: str, text: str) -> Path:
    """A new file, flushed. Raises OSError."""
    path = folder / f"named-{key}.json"
    path.touch(FILE_MODE)
    path.write_text(text, encoding="utf-8")
    flush(path)
    return path


def remove_record(blob: Path, key: str, tombstone: bool) -> None:
    """No room is needed for it. Raises OSError; a no-op if there is no such record."""
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
    """Write the records durably into `tmp`; what is given moves them beside their blobs, which needs no more room.

    `records`: by digest. A blob that is not there is passed over. Raises OSError.
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

        def publish() -> None:
            for digest, paths in files.items():
                with suppress(FileNotFoundError):
                    for path in paths:
                        path.rename(blob_of(digest) / path.name)
                    flush(blob_of(digest))

        yield publish
