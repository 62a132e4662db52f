"""Takes a backup beside running servers, and restores one into an empty store folder or Redis.

A backup is the catalog at one moment with all the blobs that it names, each verified. If a blob is deleted while the
backup is taken, a newer moment is taken. Blobs that are broken at the source are left out and named in the list.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import sync_records
from lora_serve.adapters.catalog.journals.base import Journal, Page, Position
from lora_serve.adapters.catalog.opening import CATALOG_NAME, redis_journal
from lora_serve.adapters.catalog.state import BLOB, CatalogState
from lora_serve.adapters.maintenance.copying import MARK as INCOMPLETE
from lora_serve.adapters.maintenance.copying import (
    BackupList,
    BlobCopier,
    OnProgress,
    copy_database,
    read_journal,
    read_list,
    write_journal,
    write_list,
)
from lora_serve.adapters.maintenance.registries import (
    NotCopyableError,
    RegistryAddress,
    claim_folder,
    labels_of,
    open_redis_store,
)
from lora_serve.adapters.regular_file import copy_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import FILE_MODE, flush, lock_store, remove_folder
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

_TRIES = 20  # changes of the registry that may come first
Missing = Mapping[str, tuple[str, ...]]  # see BackupList
MARK = "restore.incomplete"


@dataclass(frozen=True, slots=True)
class OtherDatabases:
    """The databases of a backup beside the catalog. `files`: names in a store folder; `journals`: databases that
    replicas share, as file name -> name of the journal in Redis' keys.
    """

    files: tuple[str, ...]
    journals: Mapping[str, str]


class BackupError(Exception):
    """A database cannot be copied, or a backup was changed; the text names the file."""


@contextmanager
def _source(address: RegistryAddress, folder: Path) -> Iterator[tuple[Callable[[], Page], AdapterStore]]:
    """A function that copies the catalog as it is now into the backup's folder, and the store of the blobs."""
    if address.is_redis:
        with open_redis_store(address) as (journal, store, _):

            def take_shared() -> Page:
                page = journal.load()
                write_journal(page, folder / CATALOG_NAME)
                return page

            yield take_shared, store
        return
    if not (address.folder / CATALOG_NAME).is_file():
        raise ConfigError(f"{address.flag} {address.text}: there is no registry ({CATALOG_NAME}) in this folder.")

    def take() -> Page:
        copy_database(address.folder / CATALOG_NAME, folder / CATALOG_NAME)
        return read_journal(folder / CATALOG_NAME)

    yield take, DiskStore(address.folder)


def back_up(
    source: RegistryAddress, target: RegistryAddress, others: OtherDatabases, on_progress: OnProgress
) -> BackupList:
    """Take a backup; servers may be running. Raises ConfigError, AdapterUnavailableError, BackupError."""
    folder, taken = target.folder, time.time()
    try:
        with _source(source, folder) as (take, store):
            claim_folder(folder, INCOMPLETE, target.flag)
            kept = DiskStore(folder)
            page, missing = _consistent(take, store, kept, on_progress)
            databases = [CATALOG_NAME, *_take_others(source, folder, others)]
            for digest in kept.digests() - CatalogState.of(page).snapshot.digests:
                kept.delete(digest)
            _forget_records(kept)
            sync_records(kept, CatalogState.of(page))
            kept.tmp.rmdir()
            return write_list(folder, taken, page, databases, kept.digests(), missing)
    except sqlite3.Error as error:
        raise BackupError(f"a database cannot be copied: {error}") from None
    except OSError as error:
        raise AdapterUnavailableError(f"The backup cannot be written: {error.strerror or error}.") from None


def _consistent(
    take: Callable[[], Page], store: AdapterStore, kept: DiskStore, on_progress: OnProgress
) -> tuple[Page, Missing]:
    """Copies the catalog at a moment at which every blob can be copied, except those that are broken at the source.

    A blob is broken, and was not deleted meanwhile, if a later moment still names it.
    """
    before: set[str] = set()
    for _ in range(_TRIES):
        page = take()
        sizes = CatalogState.of(page).snapshot.sizes
        copier = BlobCopier(store, kept, kept.tmp, sizes, on_progress)
        broken = set()
        for digest in sorted(sizes):
            if not copier.is_there(digest, is_quick=False):
                try:
                    copier.copy(digest)
                except NotCopyableError:
                    broken.add(digest)
            copier.pass_over(digest)
        if broken <= before or take().position == page.position:
            snapshot = CatalogState.of(page).snapshot
            return page, {digest: labels_of(snapshot, digest) for digest in sorted(broken)}
        before |= broken
    raise AdapterUnavailableError("The registry is changed too often to be copied; try again.")


def _take_others(source: RegistryAddress, folder: Path, others: OtherDatabases) -> list[str]:
    if source.is_redis:
        for name, journal_name in others.journals.items():
            with closing(redis_journal(source.target, source.redis_prefix, journal_name)) as journal:
                write_journal(journal.load(), folder / name)
        return list(others.journals)
    there = [name for name in others.files if (source.folder / name).is_file()]
    for name in there:
        copy_database(source.folder / name, folder / name)
    return there


def restore(
    source: RegistryAddress, target: RegistryAddress, others: OtherDatabases, on_progress: OnProgress
) -> BackupList:
    """Restore into a new or empty store folder, or a Redis without a registry. Can be repeated if it breaks off.

    Raises ConfigError, AdapterUnavailableError, BackupError.
    """
    listed = read_list(source.folder, source.flag)
    try:
        return (_restore_redis if target.is_redis else _restore_folder)(source, target, listed, others, on_progress)
    except NotCopyableError as error:
        raise BackupError(str(error)) from None
    except OSError as error:
        raise AdapterUnavailableError(f"The backup cannot be restored: {error.strerror or error}.") from None


def _restore_folder(
    source: RegistryAddress, target: RegistryAddress, listed: BackupList, _: OtherDatabases, on_progress: OnProgress
) -> BackupList:
    folder = target.folder
    _check_new(folder, target.flag)
    with closing(lock_store(folder)), _emptied_if_refused(folder):
        (folder / MARK).touch(FILE_MODE)
        state = CatalogState.of(read_journal(_private_copy(source.folder / CATALOG_NAME, folder / "restored.sqlite3")))
        store = DiskStore(folder)
        _copy_blobs(source, store, store.tmp, state, listed, on_progress)
        sync_records(store, state)
        for name in listed.databases:  # no server starts here before the catalog exists
            if name != CATALOG_NAME:
                _private_copy(source.folder / name, folder / name)
        flush(folder)
        (folder / "restored.sqlite3").rename(folder / CATALOG_NAME)
        (folder / MARK).unlink()
        flush(folder)
    return listed


def _restore_redis(
    source: RegistryAddress,
    target: RegistryAddress,
    listed: BackupList,
    others: OtherDatabases,
    on_progress: OnProgress,
) -> BackupList:
    with open_redis_store(target) as (journal, store, tmp):
        if journal.load().position.epoch:
            raise ConfigError(
                f"{target.flag} {target.text}: expected a Redis that holds no registry under this prefix."
            )
        page = read_journal(_private_copy(source.folder / CATALOG_NAME, tmp / CATALOG_NAME))
        state = CatalogState.of(page)
        _copy_blobs(source, store, tmp, state, listed, on_progress)
        for name, journal_name in others.journals.items():
            if name in listed.databases:
                records = read_journal(_private_copy(source.folder / name, tmp / name)).records
                with closing(redis_journal(target.target, target.redis_prefix, journal_name)) as other:
                    _commit_anew(other, records)
        _commit_anew(journal, page.records)
        sync_records(store, CatalogState.of(journal.load()))
    return listed


@contextmanager
def _emptied_if_refused(folder: Path) -> Iterator[None]:
    """Leaves nothing of a backup that is no good: all that lies there is of this restore, or of one that broke off."""
    try:
        yield
    except (NotCopyableError, ConfigError):
        for path in folder.iterdir():
            if path.is_dir():
                remove_folder(path)
            elif path.name not in ("lock", MARK):
                path.unlink()
        (folder / MARK).unlink(missing_ok=True)
        raise


def _check_new(folder: Path, flag: str) -> None:
    """Raises ConfigError."""
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there - {"lock"} and MARK not in there:
        raise ConfigError(f"{flag} {folder}: expected a folder that is new or empty.")


def _copy_blobs(
    source: RegistryAddress,
    store: AdapterStore,
    tmp: Path,
    state: CatalogState,
    listed: BackupList,
    on_progress: OnProgress,
) -> None:
    """Blobs that the backup lacks stay named by the catalog. Raises NotCopyableError, AdapterUnavailableError."""
    sizes = state.snapshot.sizes
    copier = BlobCopier(DiskStore(source.folder), store, tmp, sizes, on_progress)
    for digest in sorted(sizes):
        if digest not in listed.missing and not copier.is_there(digest, is_quick=False):
            copier.copy(digest)
        copier.pass_over(digest)


def _private_copy(source: Path, target: Path) -> Path:
    target.unlink(missing_ok=True)  # of an unfinished restore
    copy_regular(source.parent.resolve() / source.name, target)
    target.chmod(FILE_MODE)
    flush(target)
    return target


def _commit_anew(journal: Journal, records: Mapping[str, str | None]) -> None:
    """Begins a registry of its own, whatever replicas still know of another; old leases are dropped. Does nothing if
    a restore that broke off has done it. Raises AdapterUnavailableError.
    """
    kept = {key: text for key, text in records.items() if not key.startswith(BLOB)}
    made = journal.commit(Position(), kept, Position(uuid.uuid4().hex, 1, uuid.uuid4().hex))
    if made is None and journal.load().records != kept:
        raise AdapterUnavailableError("A server has begun a registry there meanwhile.")


def _forget_records(store: DiskStore) -> None:
    for digest, texts in store.records(store.digests()).items():
        for key in texts:
            store.remove_record(digest, key, tombstone=False)
