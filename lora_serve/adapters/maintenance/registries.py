"""Opens a registry, in a store folder or in Redis, without a server: for copying and inspecting it."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import CatalogEntry, check_metadata, check_sharing, check_tenant
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.opening import (
    CATALOG_NAME,
    check_catalog_exists,
    check_own_catalog,
    open_own,
    redis_journal,
)
from lora_serve.adapters.catalog.state import ADAPTER, Snapshot
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore, is_sound
from lora_serve.adapters.stores.files import FILE_MODE, flush, lock_store, make_private, remove_folder
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, InvalidRequestError

REPLICA = "transfer"  # the holder's name in leases; a server's name is random
_SCHEMES = ("redis://", "rediss://", "unix://")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """A store folder or a Redis URL. `flag`: the command line's flag that named it, for error messages."""

    target: str = field(repr=False)  # a URL may hold a password
    flag: str
    redis_prefix: str = "lora_serve"

    @property
    def is_redis(self) -> bool:
        return self.target.startswith(_SCHEMES)

    @property
    def folder(self) -> Path:
        return Path(self.target)

    @property
    def text(self) -> str:
        """The address without user and password."""
        if not self.is_redis:
            return self.target
        parts = urlsplit(self.target)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class OpenRegistry:
    """An open registry."""

    address: RegistryAddress
    catalog: Catalog
    store: AdapterStore
    tmp: Path  # private, for files in transit
    unreadable: tuple[str, ...]  # ids whose records no server wrote


@contextmanager
def open_registry(address: RegistryAddress, is_source: bool, replica: str = REPLICA) -> Iterator[OpenRegistry]:
    """Open a registry; a folder is locked meanwhile. `is_source`: it must exist.

    Raises ConfigError; AdapterUnavailableError if Redis cannot be reached.
    """
    with ExitStack() as stack:
        try:
            place = _open_redis(address, replica, stack) if address.is_redis else _open_folder(address, replica, stack,
                is_source)  # fmt: skip
            if is_source and address.is_redis and not place.catalog.snapshot.position.epoch:
                raise ConfigError(f"{address.text} holds no registry under the prefix {address.redis_prefix!r}.")
        except ConfigError as error:
            said = str(error).removeprefix(f"--store {address.target}: ").removeprefix("--redis-url: ")
            raise ConfigError(f"{address.flag} {address.text}: {said}") from error
        yield place


def _open_folder(address: RegistryAddress, replica: str, stack: ExitStack, is_source: bool) -> OpenRegistry:
    folder = address.folder
    if is_source and not (folder / CATALOG_NAME).is_file():
        raise ConfigError(
            f"there is no registry ({CATALOG_NAME}) in this folder; servers with --redis-url keep theirs in Redis."
        )
    if not is_source:
        check_catalog_exists(folder / CATALOG_NAME, folder / "blobs", f"--store {folder}")
    lock = stack.enter_context(closing(lock_store(folder)))
    catalog = stack.enter_context(closing(open_own(folder, replica, lock)))
    tmp = folder / "tmp"
    try:
        store = DiskStore(folder)
    except OSError as error:
        raise ConfigError(f"the folder cannot be used: {error.strerror}") from None
    catalog.keep_blob_records(store)
    if not is_source:
        check_own_catalog(catalog.ledger.state, store, f"--store {folder}")
        for left in tmp.iterdir():  # of a killed process, as this one has the lock
            remove_folder(left)
    return OpenRegistry(address, catalog, store, tmp, _unreadable(catalog))


def _open_redis(address: RegistryAddress, replica: str, stack: ExitStack) -> OpenRegistry:
    journal, store, tmp = stack.enter_context(open_redis_store(address))
    catalog = Catalog(journal, replica, is_shared=True)
    catalog.keep_blob_records(store)
    return OpenRegistry(address, catalog, store, tmp, _unreadable(catalog))


@contextmanager
def open_redis_store(address: RegistryAddress) -> Iterator[tuple[Journal, AdapterStore, Path]]:
    """The journal, the blobs and a private folder for files in transit. Raises ConfigError."""
    with ExitStack() as stack:
        journal = stack.enter_context(closing(redis_journal(address.target, address.redis_prefix)))
        module = importlib.import_module("lora_serve.adapters.stores.redis")
        store = stack.enter_context(closing(module.RedisStore(address.target, f"{address.redis_prefix}:adapters:")))
        yield journal, store, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora_serve-")))


def claim_folder(folder: Path, mark: str, flag: str) -> None:
    """Make a folder for an export or a backup, or resume an unfinished one, which has the file `mark`.

    Raises ConfigError for any other folder that is not empty, so that nothing is overwritten.
    """
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / mark).is_file():
            raise ConfigError(f"{flag} {folder}: expected a folder that is new or empty.")
        make_private(folder)
        (folder / mark).touch(FILE_MODE)
        flush(folder)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: the folder cannot be used: {error.strerror}") from None


def _unreadable(catalog: Catalog) -> tuple[str, ...]:
    while (page := catalog.ledger.journal.load()).position != catalog.snapshot.position:  # a server wrote in between
        catalog.refresh()
    ids = {key.removeprefix(ADAPTER) for key in page.records if key.startswith(ADAPTER)}
    return tuple(sorted(ids - catalog.snapshot.entries.keys()))


class NotCopyableError(Exception):
    """An id cannot be copied; the text says why."""


@dataclass(frozen=True, slots=True)
class BadBlob:
    """A named blob that cannot be served."""

    digest: str
    problem: str  # "missing" or "corrupt"
    labels: tuple[str, ...]  # the versions that name it, as `id@version`


@dataclass(frozen=True, slots=True)
class Inventory:
    """The content of a registry, in figures."""

    num_adapters: int
    num_versions: int
    num_aliases: int
    num_bytes: int  # of all distinct contents, as they are served
    num_blobs: int
    missing: tuple[str, ...]  # digests that a version names and the store lacks
    unnamed: tuple[str, ...]  # digests that the store has and no version names: being registered or removed
    aside: tuple[str, ...]  # digests of orphaned blobs, which the catalog did not know at some start


def check_entry(entry: CatalogEntry, aliases: Mapping[str, str]) -> None:
    """Raises NotCopyableError for an entry that no server has written."""
    try:
        for name in (entry.name, *aliases):
            check_adapter_id(name)
        check_tenant(entry.tenant)
        check_metadata(entry.metadata)
        check_sharing(entry.shared_with)
    except InvalidRequestError as error:
        raise NotCopyableError(f"its record is not sound: {error}") from None
    numbers = [version.version for version in entry.versions]
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= entry.last_version:
        raise NotCopyableError("its record is not sound: the versions' numbers contradict each other")
    if bad := [version.digest for version in entry.versions if not _DIGEST.match(version.digest)]:
        raise NotCopyableError(f"its record is not sound: {bad[0][:80]!r} is no digest")


def is_readable(store: AdapterStore, digest: str) -> bool:
    """True if the store returns exactly what `digest` names. Raises AdapterUnavailableError if it is away."""
    try:
        with store.open(digest) as folder:
            return is_sound(folder, digest)
    except AdapterUnavailableError:
        store.has(digest)  # raises if it is the whole store that is away
        return False


def inventory_of(place: OpenRegistry) -> Inventory:
    """Count, and compare names, without reading a blob. Raises AdapterUnavailableError."""
    snapshot, store = place.catalog.snapshot, place.store
    kept = store.digests()
    sizes = snapshot.sizes
    return Inventory(
        len(snapshot.entries),
        sum(len(entry.versions) for entry in snapshot.entries.values()),
        len(snapshot.aliases),
        sum(sizes.values()),
        len(kept),
        tuple(sorted(digest for digest in sizes if digest not in kept or not store.has(digest))),
        tuple(sorted(kept - sizes.keys())),
        store.orphans.digests() if isinstance(store, DiskStore) else (),
    )


def bad_blobs(place: OpenRegistry, on_progress: Callable[[int, int], None]) -> Iterator[BadBlob]:
    """Read and verify every named blob; `on_progress`: bytes done, bytes in all.

    Raises AdapterUnavailableError.
    """
    sizes = place.catalog.snapshot.sizes
    done, total = 0, sum(sizes.values())
    for digest, num_bytes in sizes.items():
        if not (_DIGEST.match(digest) and is_readable(place.store, digest)):
            place.catalog.refresh()  # a server may have deleted it meanwhile
            if labels := labels_of(place.catalog.snapshot, digest):
                has = _DIGEST.match(digest) and place.store.has(digest)
                yield BadBlob(digest, "corrupt" if has else "missing", labels)
        done += num_bytes
        on_progress(done, total)


def labels_of(snapshot: Snapshot, digest: str) -> tuple[str, ...]:
    """The versions that name a digest, as `id@version`."""
    found = [entry.ref(version) for entry in snapshot.entries.values() for version in entry.versions
             if version.digest == digest]  # fmt: skip
    return tuple(f"{ref.name}@{ref.version}" for ref in found)
