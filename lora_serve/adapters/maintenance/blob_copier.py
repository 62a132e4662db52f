"""Copies blobs from one store to another, each verified on its way, and counts the bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import BlobRecord, record_of
from lora_serve.adapters.checkpoint.content import adapter_digest, check_sizes, content_names
from lora_serve.adapters.maintenance.registries import NotCopyableError, is_readable
from lora_serve.adapters.regular_file import open_regular, pieces_of
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import content_bytes, is_sound
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.adapters.stores.record_files import read_records
from lora_serve.core.errors import AdapterUnavailableError

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; the second is an estimate at first


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
