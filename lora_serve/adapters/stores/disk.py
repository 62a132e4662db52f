"""Adapter files in a local folder: STORE/blobs/<hex>/{adapter_config.json, adapter_model.safetensors}."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.checkpoint.artifact import check_files
from lora_serve.adapters.checkpoint.content import WEIGHTS_NAME, adapter_digest, check_sizes, content_names
from lora_serve.adapters.checkpoint.safetensors_header import read_header
from lora_serve.adapters.regular_file import UnsoundFileError
from lora_serve.adapters.stores.base import MayDelete, Records
from lora_serve.adapters.stores.disk_tables import (
    TOMBSTONE,
    BlobTable,
    OrphanedBlobs,
    is_record,
    read_records,
    record_path,
    remove_record,
    staged_records,
    write_record,
)
from lora_serve.adapters.stores.files import (
    FILE_MODE,
    UNWRITABLE,
    flush,
    link_or_copy,
    listed,
    make_private,
    private_or_later,
    remove_folder,
    scratch_folder,
    words_of,
)
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    PayloadTooLargeError,
    StoreUnwritableError,
)
from lora_serve.core.figures import EvictionReason, TierStats

BLOB_NAME = re.compile(r"[0-9a-f]{64}\Z")
MAX_QUARANTINED = 8  # broken blobs that a cache keeps
_log = logging.getLogger(__name__)


class DiskStore:
    """See AdapterStore, StoreFigures. Content-addressed and crash-safe: a blob is built in STORE/tmp, flushed, renamed.

    The store of record refuses blobs beyond its budget in bytes; the cache of a far store evicts the least valuable
    blobs, never a held one.
    """

    def __init__(
        self, store: Path, max_bytes: int | None = None, *, is_cache: bool = False, policy: str = "lru"
    ) -> None:
        """`max_bytes` of all blobs (None: no limit). `policy`: a file in adapters/eviction.

        Raises OSError if anything else is in the place of a folder.
        """
        self._blobs = private_or_later(store / "blobs")
        self.tmp = private_or_later(store / "tmp")  # for files in transit; emptied by `sweep`
        self._quarantine = store / "quarantine"
        self.orphans = OrphanedBlobs(store / "unnamed")
        self._max_bytes = max_bytes
        self._is_cache = is_cache
        self._table = BlobTable(self._scan, self._evict, max_bytes, is_cache, policy)

    def put(self, digest: str, folder: Path) -> None:
        """Replaces a broken blob of the same digest. Raises PayloadTooLargeError."""
        if self.keep(digest, folder) is None:
            raise PayloadTooLargeError(
                f"The adapter needs {content_bytes(folder)} bytes on disk; --adapter-disk-memory allows "
                f"{self._max_bytes} in all: delete adapters or raise it."
            )

    def keep(self, digest: str, folder: Path, load_seconds: float = 0.0, records: Records | None = None) -> Path | None:
        """`put` that returns the blob; None, and nothing is written, if no room can be made.

        `load_seconds`: the time that fetching the folder took, 0: not known. `records`: written together with the blob.
        """
        started, blob, records = time.perf_counter(), self._blob(digest), dict(records or {})
        is_replaced = False
        with _readable_errors():
            if blob.exists():
                try:
                    if _is_intact(blob, digest):
                        return blob
                except OSError as error:
                    _log.warning("blob %s cannot be read: %r", blob.name, error)
                    if self._is_cache:  # it may be whole, and is at hand elsewhere
                        return None
                is_replaced, records = True, read_records(blob) | records  # other ids name the same content
                self._table.left(digest, EvictionReason.CORRUPT)
            if not self._table.admit(digest, content_bytes(folder), load_seconds):
                if is_replaced:
                    self._set_aside(blob)
                return None
            try:
                self._write(blob, folder, records, is_replaced)
            except BaseException:
                if not blob.is_dir():
                    self._table.left(digest, None)
                raise
        self._table.arrived(load_seconds + time.perf_counter() - started)
        return blob

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """The blob itself, without a copy."""
        with self.holding(digest):
            blob = self._blob(digest)
            self._table.looked_up(digest, blob.is_dir())
            if not blob.is_dir():
                raise AdapterUnavailableError(f"The adapter store does not have {digest}.")
            yield blob

    def holding(self, digest: str) -> AbstractContextManager[None]:
        """The blob, which need not be here yet, is not evicted meanwhile."""
        return self._table.holding(digest)

    def sound_copy(self, digest: str) -> Path | None:
        """The blob if it is here and intact; a broken one is set aside, one that cannot be read at present stays. Call
        it while `holding`.
        """
        blob, is_here, is_broken = self._blob(digest), False, False
        if blob.is_dir():
            try:
                is_here = _is_intact(blob, digest)
                is_broken = not is_here
            except OSError as error:
                _log.warning("blob %s cannot be read: %r", blob.name, error)
        if is_broken:
            with _readable_errors():
                self._set_aside(blob)
                self._table.left(digest, EvictionReason.CORRUPT)
        self._table.looked_up(digest, is_here)
        if is_here:
            with suppress(OSError):
                os.utime(blob)  # the order of use outlives a restart
        return blob if is_here else None

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """Put another file, which is no part of the digest, into the blob's folder, if there is room for it.

        It is not flushed: a reader must check whether it is complete. Raises OSError, also if there is no blob.
        """
        with scratch_folder(self.tmp) as scratch:
            (scratch / name).write_bytes(content)
            self.take_beside(digest, scratch / name)

    def take_beside(self, digest: str, file: Path) -> None:
        """`keep_beside` that moves a file of the same file system, which keeps its name."""
        with self.holding(digest):
            if self._table.grow(digest, file.stat().st_size):
                file.chmod(FILE_MODE)
                file.rename(self._blob(digest) / file.name)

    def has(self, digest: str) -> bool:
        return self._blob(digest).is_dir()

    def delete(self, digest: str) -> None:
        """Renames the blob first, so that half a blob is never seen."""
        blob = self._blob(digest)
        with _readable_errors(), scratch_folder(self.tmp) as scratch:
            if blob.is_dir():
                blob.rename(scratch / "blob")
                flush(self._blobs)
                self._table.left(digest, EvictionReason.DELETED)

    def tiers(self) -> dict[str, TierStats]:
        with _readable_errors():
            return {"disk": self._table.stats()}

    def places_of(self, digest: str) -> tuple[str, ...]:
        return ("disk",) if os.path.isdir(f"{self._blobs}/{digest.removeprefix('sha256:')}") else ()

    def digests(self) -> frozenset[str]:
        with _readable_errors():
            return frozenset("sha256:" + blob.name for blob in listed(self._blobs) if BLOB_NAME.match(blob.name))

    def release(self, digest: str) -> None:
        """A no-op: there is no other copy."""

    def records(self, digests: Collection[str]) -> dict[str, dict[str, str]]:
        with _readable_errors():
            return {digest: read_records(self._blob(digest)) for digest in digests if self.has(digest)}

    @contextmanager
    def staging(self, records: Mapping[str, Records]) -> Iterator[Callable[[], None]]:
        here = {digest: texts for digest, texts in records.items() if self.has(digest)}
        with _readable_errors(), staged_records(self.tmp, self._blob, here) as publish:
            yield publish

    def remove_record(self, digest: str, key: str, tombstone: bool) -> None:
        with _readable_errors():
            remove_record(self._blob(digest), key, tombstone)

    def sweep(self, named: Set[str], may_delete: MayDelete, days: float = 0) -> int:
        """Remove leftovers of a crash, and set aside blobs whose form is broken; foreign files stay. Raises OSError.

        Others than `named` go if `may_delete` says so, else they are orphans for `days` (0: always); returns how many.
        """
        for folder in listed(self.tmp):
            remove_folder(folder)
        for digest in self.digests():
            self.sweep_blob(digest, digest in named, may_delete)
        self.orphans.expire(days)
        return sum(1 for _ in self.orphans.all())

    def is_well_formed(self, digest: str) -> bool:
        """True if the blob is whole as far as its form tells, or cannot be read at present."""
        return _is_well_formed(self._blob(digest))

    def sweep_blob(self, digest: str, is_named: bool, may_delete: MayDelete) -> None:
        """`sweep` of one blob, which must not be written meanwhile. Raises OSError."""
        blob = self._blob(digest)
        if not blob.is_dir() or (is_named and _is_well_formed(blob)):
            return
        if is_named:
            self._set_aside(blob)
        elif _may_delete(digest, blob, may_delete):
            with scratch_folder(self.tmp) as scratch:
                blob.rename(scratch / "blob")
        else:
            self.orphans.take(blob)
        flush(self._blobs)
        self._table.left(digest, None)

    def _blob(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        assert BLOB_NAME.match(name), digest
        return self._blobs / name

    def _write(self, blob: Path, folder: Path, records: Records, is_replaced: bool) -> None:
        """`is_replaced`: the blob that is there is broken, or cannot be read here; it stays until all is written."""
        with scratch_folder(self.tmp) as scratch:
            for name in content_names(folder):
                link_or_copy(folder / name, scratch / name)
            for key, text in records.items():
                write_record(record_path(scratch, key), text)
            for path in sorted(listed(scratch)):  # once all are there: the first writes the file system's log for all
                flush(path)
            flush(scratch)
            make_private(self._blobs)
            if is_replaced:
                if is_sound(blob, "sha256:" + blob.name):  # another thread was first
                    return
                self._set_aside(blob)
            self._rename(scratch, blob)

    def _rename(self, scratch: Path, blob: Path) -> None:
        try:
            scratch.rename(blob)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another thread put the same content first
                raise
        flush(self._blobs)

    def _set_aside(self, blob: Path) -> None:
        """Set a broken blob aside for the operator; a cache keeps only the last few."""
        try:
            place = make_private(self._quarantine) / f"{blob.name}-{time.time_ns()}"
        except NotADirectoryError as error:
            _log.warning("blob %s is broken and removed: quarantine is %s", blob.name, words_of(error))
            self._evict("sha256:" + blob.name)
            return
        try:
            blob.rename(place)
        except FileNotFoundError:  # another thread was first
            return
        _log.warning("blob %s is broken; moved to %s", blob.name, place)
        if not self._is_cache:  # what looks broken may be all that is left
            return
        oldest_first = sorted(self._quarantine.iterdir(), key=lambda folder: folder.name.rpartition("-")[2])
        for folder in oldest_first[:-MAX_QUARANTINED]:
            remove_folder(folder)

    def _scan(self) -> list[tuple[str, int]]:
        """Every blob with its bytes, least recently used first."""
        blobs = [blob for blob in listed(self._blobs) if BLOB_NAME.match(blob.name)]
        return [
            ("sha256:" + blob.name, sum(file.stat().st_size for file in blob.iterdir() if not is_record(file.name)))
            for blob in sorted(blobs, key=lambda blob: blob.stat().st_mtime_ns)
        ]

    def _evict(self, digest: str) -> None:
        with scratch_folder(self.tmp) as scratch, suppress(FileNotFoundError):
            self._blob(digest).rename(scratch / "blob")


def content_bytes(folder: Path) -> int:
    """The bytes of the content files that exist. Raises OSError."""
    return sum((folder / name).stat().st_size for name in content_names(folder) if (folder / name).is_file())


def is_sound(folder: Path, digest: str) -> bool:
    """True if the folder has exactly the content that `digest` names, and it can be read."""
    try:
        return _is_intact(folder, digest)
    except OSError:
        return False


def _is_intact(folder: Path, digest: str) -> bool:
    """True if the folder has exactly the content that `digest` names. Raises OSError if it cannot be read at present:
    then it may be either.
    """
    try:
        check_sizes(folder)
        return adapter_digest(folder) == digest
    except (UnsoundFileError, FileNotFoundError, NotADirectoryError):
        return False


def _may_delete(digest: str, blob: Path, may_delete: MayDelete) -> bool:
    try:
        return may_delete(digest, read_records(blob), read_records(blob, TOMBSTONE))
    except OSError:
        return False


def _is_well_formed(blob: Path) -> bool:
    """True also if the blob cannot be read at present, as it may be intact."""
    try:
        check_files(blob)
        read_header(blob / WEIGHTS_NAME)
    except (InvalidAdapterError, FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        _log.warning("blob %s cannot be read: %r", blob.name, error)
    return True


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("adapter store: %r", error)
        kind = StoreUnwritableError if error.errno in UNWRITABLE else AdapterUnavailableError
        raise kind(f"The adapter store on disk cannot be used at present: {words_of(error)}.") from None
