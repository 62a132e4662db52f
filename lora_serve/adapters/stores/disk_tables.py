"""Beside the blobs of a disk store: the table of their sizes and uses, their records, and the orphans.

`named-<key>.json` is a record, `gone-<key>.json` the tombstone of a removed one. They are no part of the blob's digest
and move with its folder. The catalog writes and reads their content.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Residents
from lora_serve.adapters.regular_file import NotRegularError, TooLargeFileError, read_regular
from lora_serve.adapters.stores.base import TierCounts
from lora_serve.adapters.stores.files import FILE_MODE, flush, make_private, remove_folder, words_of
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import EvictionReason, TierStats

MAX_BYTES = 2**26  # of one record
Texts = Mapping[str, str]  # by key
RECORD = re.compile(r"named-([0-9a-f]{32})\.json\Z")
TOMBSTONE = re.compile(r"gone-([0-9a-f]{32})\.json\Z")
_OWNER = ""  # tenants' floors do not apply: two may share a blob, and a store knows digests only
_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{1,12})-[0-9]+\Z")
_DAY = 86400.0
_FIRST_TIME = 1_767_225_600  # 2026-01-01, Unix seconds: before it there was no such folder, and the clock was not set
_log = logging.getLogger(__name__)


class BlobTable:
    """The sizes of the blobs, their order of use, and which are being read. Safe to call from several threads."""

    def __init__(
        self,
        scan: Callable[[], Iterable[tuple[str, int]]],
        evict: Callable[[str], None],
        max_bytes: int | None,
        is_cache: bool,
        policy: str,
    ) -> None:
        """`scan`: lists digests with bytes, least recently used first; called at the first use, so after the sweep.

        `evict`: removes a blob, under the table's lock. `is_cache`: blobs may be evicted to make room. `policy`: a file
        in adapters/eviction.
        """
        self._scan = scan
        self._evict = evict
        self._max_bytes = max_bytes
        self._is_cache = is_cache
        self._policy = policy
        self._lock = threading.RLock()
        self._held: Counter[str] = Counter()
        self._counts = TierCounts()
        self._scanned: Residents | None = None

    @contextmanager
    def holding(self, digest: str) -> Iterator[None]:
        """The blob, which need not be here yet, is not evicted meanwhile."""
        with self._lock:
            self._held[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[digest] -= 1
                if not self._held[digest]:
                    del self._held[digest]

    def admit(self, digest: str, num_bytes: int, load_seconds: float) -> bool:
        """Make room for a blob and count it; returns False, and evicts nothing, if there is none. Raises OSError."""
        with self._lock:
            if digest in self._residents:
                return True
            victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None and not self._is_cache:
                self._scanned = None  # another process may have removed blobs
                victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None:
                return False
            self._push_out(self._residents, victims, EvictionReason.CAPACITY)
            self._residents.add(digest, _OWNER, num_bytes, load_seconds)
            return True

    def grow(self, digest: str, num_bytes: int) -> bool:
        """Make room for more bytes of a held blob; returns False, and evicts nothing, if there is none."""
        with self._lock:
            if digest not in self._residents:
                return True  # it was removed meanwhile: the write will fail
            victims = self._residents.victims(_OWNER, num_bytes, self._reluctance)
            if victims is None:
                return False
            self._push_out(self._residents, victims, EvictionReason.CAPACITY)
            self._residents.grow(digest, num_bytes)
            return True

    def looked_up(self, digest: str, is_found: bool) -> None:
        """Count a lookup, which is a use if the blob was found."""
        with self._lock:
            self._counts.hits += is_found
            self._counts.misses += not is_found
            if is_found and digest in self._residents:
                self._residents.use(digest)

    def arrived(self, seconds: float) -> None:
        """Count a blob that was fetched and written in `seconds`."""
        with self._lock:
            self._counts.loaded(seconds)

    def left(self, digest: str, reason: EvictionReason | None) -> None:
        """Note that a blob is gone; `reason` None: its writing failed."""
        with self._lock:
            if self._scanned is not None and digest in self._scanned:
                self._scanned.remove(digest)
            if reason is not None:
                self._counts.evictions[reason] += 1

    def stats(self) -> TierStats:
        with self._lock:
            return self._counts.frozen(len(self._residents), self._residents.num_bytes, self._max_bytes)

    @property
    def _residents(self) -> Residents:
        if self._scanned is None:
            found = Residents(create_policy(self._policy), self._max_bytes)
            for digest, num_bytes in self._scan():
                found.add(digest, _OWNER, num_bytes)
            self._push_out(found, found.surplus(self._reluctance), EvictionReason.SHRUNK)
            self._scanned = found  # at last: half a table would not keep the budget
        return self._scanned

    def _reluctance(self, digest: str) -> int | None:
        return 0 if self._is_cache and not self._held[digest] else None

    def _push_out(self, residents: Residents, digests: Iterable[str], reason: EvictionReason) -> None:
        for digest in digests:
            self._evict(digest)
            residents.remove(digest, for_room=True)
            self._counts.evictions[reason] += 1


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
            for blob in {place.parent for place in files}:  # it is named again: no trace tells that it was let go
                for trace in blob.glob("gone-*.json"):
                    trace.unlink(missing_ok=True)
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

    def digests(self) -> tuple[str, ...]:
        """Each digest once, sorted. Raises AdapterUnavailableError."""
        try:
            return tuple(sorted({digest for digest, _ in self.all()}))
        except OSError as error:
            raise AdapterUnavailableError(f"{self.folder} cannot be read: {words_of(error)}.") from None

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
