"""Opens the catalog that the settings name: this server's own, or one that replicas share."""

from __future__ import annotations

import functools
import importlib
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import BlobRecord, read_records, record_of
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import CatalogEntry, document_of, entry_of
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal, open_mirror
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.state import (
    ADAPTER,
    ALIAS,
    BLOB,
    LINEAGE,
    BlobLease,
    CatalogState,
    lease_of,
    lineage_of,
)
from lora_serve.adapters.regular_file import read_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import BLOB_NAME
from lora_serve.adapters.stores.files import FILE_MODE, UNWRITABLE, StoreLock, StoreMonitor, flush, listed, lock_store
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, DamagedFileError, how_to_install

Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]
CATALOG_NAME, MIRROR_NAME = "catalog.sqlite3", "mirror.sqlite3"


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with the records that may have changed on both branches, as (ours, theirs), merged in.

    An adapter gets the versions of both; its route and everything else are theirs, the live branch's. An alias gives
    way to an adapter of its name. A named blob is not condemned. If ours was rebuilt since the fork, only ours counts.
    """
    merged = dict(records)
    is_rebuilt = _is_rebuilt(*contested.get(LINEAGE, (None, None)))
    for name, (ours, theirs) in contested.items():
        if is_rebuilt:
            text = ours
        elif name.startswith(ADAPTER):
            text = _joined(ours, theirs)
        else:
            text = theirs if name.startswith(BLOB) else theirs or ours
        if text is None:
            merged.pop(name, None)
        else:
            merged[name] = text
    entries = [e for n, text in merged.items() if n.startswith(ADAPTER) and (e := entry_of(text)) is not None]
    for entry in entries:
        merged.pop(ALIAS + entry.name, None)
        for version in entry.versions:
            _keep(merged, BLOB + version.digest)
    return merged


def _is_rebuilt(ours: str | None, theirs: str | None) -> bool:
    """True if our lineage has a rebuild that theirs lacks."""
    our, their = lineage_of(ours), lineage_of(theirs)
    known = their.gaps if their else ()
    return our is not None and len(our.gaps) > len(known) and our.gaps[: len(known)] == known


def _joined(ours: str | None, theirs: str | None) -> str | None:
    if ours is None or theirs is None:
        return theirs or ours
    our, their = entry_of(ours), entry_of(theirs)
    if our is None or their is None or our.tenant != their.tenant:
        return theirs if their is not None else ours
    return document_of(_united(our, their))


def _united(our: CatalogEntry, their: CatalogEntry) -> CatalogEntry:
    """Their entry with the versions that only ours has, which get a new number where theirs uses the same."""
    last, versions = max(our.last_version, their.last_version), list(their.versions)
    known = {version.digest for version in versions}
    for version in our.versions:
        if version.digest in known:
            continue
        if their.has_version(version.version):
            last += 1
            version = replace(version, version=last)  # noqa: PLW2901
        versions.append(version)
    return replace(their, last_version=last, versions=tuple(sorted(versions, key=lambda v: v.version)))


def _keep(records: Records, name: str) -> None:
    note = lease_of(records.get(name))
    if note.condemned:
        records[name] = BlobLease(note.holders).text


class DamagedCatalogError(ConfigError):
    """The catalog's file exists and cannot be read completely."""


def open_catalog(
    store: Path, redis_url: str | None = None, redis_prefix: str = "lora_serve", monitor: StoreMonitor | None = None
) -> Catalog:
    """Lock the store folder and open its catalog; with `redis_url`, the shared one.

    A shared registry that cannot be reached now is served from the folder's mirror of it. `monitor`: opens files for
    writing later that can only be read now. Raises ConfigError.
    """
    lock = lock_store(store)
    try:
        if redis_url is None:
            return open_own(store, replica_name(store, monitor), lock, monitor)
        journal = MirroredJournal(
            redis_journal(redis_url, redis_prefix), open_mirror(store / MIRROR_NAME, monitor=monitor), merge_branches
        )
        return Catalog(journal, replica_name(store, monitor), lock, is_shared=True)
    except BaseException:
        lock.close()
        raise


def open_own(store: Path, replica: str, lock: StoreLock, monitor: StoreMonitor | None = None) -> Catalog:
    """The catalog of a locked folder. Raises ConfigError, also for a damaged one, which stays as it is."""
    path = store / CATALOG_NAME
    try:
        return Catalog(SqliteJournal(path, monitor=monitor), replica, lock)
    except DamagedFileError as error:
        raise ConfigError(f"--store {store}: {_damaged(store, error.reason)}") from None
    except AdapterUnavailableError as error:
        raise ConfigError(f"--store {store}: {_damaged(store, error)}") from None


def load_own(store: Path) -> CatalogState | None:
    """The catalog's state in a locked folder; None: there is no catalog. Raises DamagedCatalogError, ConfigError."""
    path = store / CATALOG_NAME
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        with closing(SqliteJournal(path)) as journal:
            return CatalogState.of(journal.load())
    except DamagedFileError as error:
        raise _damaged(store, error.reason) from None
    except AdapterUnavailableError as error:
        raise _damaged(store, error) from None


def _damaged(store: Path, reason: object) -> DamagedCatalogError:
    return DamagedCatalogError(
        f"the adapter catalog cannot be used: {str(reason).strip('. *')}. Nothing was changed. "
        f"`lora-serve registry rebuild --store {store}` makes the catalog again from the blobs."
    )


def redis_journal(url: str, prefix: str, name: str = "registry", title: str = "adapter registry") -> Journal:
    """A journal that replicas share. `name`: part of its keys; `title`: names it in messages. Raises ConfigError."""
    try:
        redis = importlib.import_module("lora_serve.adapters.catalog.journals.redis")
    except ImportError:
        raise ConfigError(f"--redis-url needs the package redis: {how_to_install('redis')}") from None
    journal: Journal = redis.RedisJournal(url, prefix, name=name, title=title)
    return journal


def replica_name(store: Path, monitor: StoreMonitor | None = None) -> str:
    """A random name that the folder keeps, by which a server knows its own leases after a crash. Raises ConfigError.

    `monitor`: writes it later if that is not possible now.
    """
    path = store / "replica"
    try:
        path = store.resolve() / path.name  # the store may be a link
        if path.exists() and (name := read_regular(path, 1000).decode().strip()):
            return name
        name = uuid.uuid4().hex
        try:
            _keep_name(path, name)
        except OSError as error:
            if error.errno not in UNWRITABLE or monitor is None:
                raise
            monitor.retry_when_writable("the replica's name", functools.partial(_keep_name, path, name))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--store {store}: {path.name}, this server's name, cannot be used: {error}") from None
    return name


def _keep_name(path: Path, name: str) -> None:
    path.touch(FILE_MODE)
    path.write_text(name)
    flush(path)


def check_catalog_exists(catalog: Path, blobs: Path, flag: str) -> None:
    """Check, before any file is made, that no catalog is begun anew beside blobs. Raises ConfigError."""
    there = any(path.is_file() and path.stat().st_size for path in (catalog, catalog.with_name(f"{catalog.name}-wal")))
    if not there and not (os.path.lexists(catalog) and not catalog.is_file()):
        _check_begun(sum(1 for path in listed(blobs) if BLOB_NAME.match(path.name)), flag)


def check_own_catalog(state: CatalogState, store: AdapterStore, flag: str) -> None:
    """Check the catalog of a store that only this server writes. `flag`: names the registry. Raises ConfigError."""
    digests = store.digests()
    if not state.position.epoch:
        _check_begun(len(digests), flag)
        return
    num_ahead = _num_blobs(store, digests, lambda record: not CatalogHistory(state).includes(record.position))
    if num_ahead:
        raise ConfigError(
            f"{flag}: the catalog is older than {num_ahead} of the {len(digests)} blobs beside it, or another store's. "
            + _ways_out(flag)
        )


def check_shared_catalog(state: CatalogState, store: AdapterStore, near: AdapterStore, flag: str) -> None:
    """Check a registry that replicas share, unless it is away. `near`: this replica's copies. Raises ConfigError."""
    _check_not_set_back(state, near, flag)
    if state.position.epoch and state.lineage is not None:
        return
    try:
        digests = store.digests()
        records = read_records(store, digests) if state.position.epoch else []
    except AdapterUnavailableError:
        return
    if not state.position.epoch:
        _check_begun(len(digests), flag)
    if any(CatalogHistory(state).includes(record.position) for record in records):
        raise ConfigError(f"{flag}: the registry has lost its records of {len(digests)} blobs. {_ways_out(flag)}")


def _check_not_set_back(state: CatalogState, near: AdapterStore, flag: str) -> None:
    """By now a replica that kept a newer copy of the registry has restored it."""
    num_ahead = _num_blobs(near, near.digests(), CatalogHistory(state).is_ahead)
    if num_ahead:
        raise ConfigError(f"{flag}: the registry is older than {num_ahead} of this replica's blobs. {_ways_out(flag)}")


def _num_blobs(store: AdapterStore, digests: Collection[str], is_wanted: Callable[[BlobRecord], bool]) -> int:
    """The number of blobs beside which a wanted record lies."""
    tables = store.records(digests).values()
    found = (map(record_of, texts.values()) for texts in tables)  # one after another: together they would be large
    return sum(any(record is not None and is_wanted(record) for record in table) for table in found)


def _check_begun(num_blobs: int, flag: str) -> None:
    if num_blobs:
        found = "is 1 blob and no catalog of it" if num_blobs == 1 else f"are {num_blobs} blobs and no catalog of them"
        goes_on = "begins empty and keeps the blobs aside"
        raise ConfigError(f"{flag}: there {found}: it was lost. {_ways_out(flag, goes_on)}")


def _ways_out(flag: str, goes_on: str = "goes on with what the catalog says and keeps the other blobs aside") -> str:
    return (
        f"Nothing was changed. `lora-serve registry rebuild {flag}` makes the catalog again from the blobs; "
        f"`lora-serve registry accept {flag}` {goes_on}."
    )
