"""Finds the blobs and records that are left in store folders: in use, orphaned, in quarantine or in a cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import BlobRecord, record_of
from lora_serve.adapters.maintenance.blob_copier import OnProgress
from lora_serve.adapters.stores.disk import content_bytes, is_sound
from lora_serve.adapters.stores.record_files import read_records

_OWN = ("blobs", "unnamed", "quarantine")
_COPIES = ("cache/blobs", "cache/unnamed", "cache/quarantine")
_NAME = re.compile(r"([0-9a-f]{64})(-[0-9-]+)?\Z")


class SurvivingBlobs:
    """Folders by digest, and the records in them."""

    def __init__(
        self, store: Path | None, also: Sequence[Path], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """`store`: the one whose catalog is rebuilt; `also`: other stores, whose blobs are copies."""
        self._folders: dict[str, list[Path]] = {}
        self._sound: dict[str, Path | None] = {}
        self._on_progress = on_progress
        self._done = self._total = 0
        self.records = [] if store is None else self._take(store, _OWN)
        self.copies = [] if store is None else self._take(store, _COPIES)
        for other in also:
            self.copies += self._take(other, (*_OWN, *_COPIES))

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._folders)

    def sound(self, digest: str) -> Path | None:
        """A folder that has exactly the content of the digest; None if there is none."""
        if digest not in self._sound:
            folders = self._folders.get(digest, [])
            self._sound[digest] = next((folder for folder in folders if is_sound(folder, digest)), None)
            self._done += sum(map(_bytes_in, folders))
            self._on_progress(self._done, self._total)
        return self._sound[digest]

    def _take(self, store: Path, places: Sequence[str]) -> list[BlobRecord]:
        found = []
        for digest, folder in _blobs_in(store, places):
            self._folders.setdefault(digest, []).append(folder)
            self._total += _bytes_in(folder)
            found += [record for text in _records_in(folder) if (record := record_of(text)) is not None]
        return found


def _blobs_in(store: Path, places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for place in places:
        if (store / place).is_dir():
            for path in sorted((store / place).iterdir()):
                if (named := _NAME.match(path.name)) and path.is_dir() and not path.is_symlink():
                    yield "sha256:" + named[1], path


def _records_in(folder: Path) -> list[str]:
    try:
        return list(read_records(folder).values())
    except OSError:
        return []


def _bytes_in(folder: Path) -> int:
    try:
        return content_bytes(folder)
    except OSError:
        return 0
