"""Opens the catalog and the store of its blobs, on this machine or shared by replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import sync_records
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.ledger import Follower
from lora_serve.adapters.catalog.opening import (
    CATALOG_NAME,
    check_catalog_exists,
    check_own_catalog,
    check_shared_catalog,
    open_catalog,
)
from lora_serve.adapters.regular_file import read_regular
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import FILE_MODE, StoreMonitor, words_of
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

_POSITION = "position"  # the name of a file


@dataclass(frozen=True, slots=True)
class AdapterStorage:
    """The catalog and its store; `disk` is the store's part on this machine, or all of it."""

    catalog: Catalog
    store: DiskStore | TieredStore
    disk: DiskStore


@contextmanager
def open_storage(config: AdapterConfig, monitor: StoreMonitor | None = None) -> Iterator[AdapterStorage]:
    """Open catalog and store. A shared catalog follows the other replicas until the block ends.

    `monitor`: opens files for writing later that can only be read now. Raises ConfigError.
    """
    if config.redis_url is None:
        check_catalog_exists(config.store / CATALOG_NAME, config.store / "blobs", f"--store {config.store}")
    with closing(open_catalog(config.store, config.redis_url, config.redis_prefix, monitor)) as catalog:
        if config.redis_url is None:
            disk = _disk_store(config, config.store)
            ledger = catalog.ledger
            if not is_noted(config.store, ledger.state.position):  # else no blob need be looked at
                check_own_catalog(ledger.state, disk, f"--store {config.store}")
            note_position(config.store, ledger.state.position)
            ledger.listen(lambda: note_position(config.store, ledger.state.position))
            yield AdapterStorage(catalog, disk, disk)
            return
        from lora_serve.adapters.stores.redis import RedisStore

        # Beside the embedded registry's blobs, not among them: a cache drops what the shared registry does not name.
        cache = _disk_store(config, config.store / "cache", is_cache=True)
        far = RedisStore(config.redis_url, f"{config.redis_prefix}:adapters:", tmp=cache.tmp)
        store = TieredStore(cache, far)
        check_shared_catalog(catalog.ledger.state, store, cache, f"--redis-url URL --also {config.store}")
        with closing(Follower(catalog.ledger, lambda: _replenish(store, catalog))) as follower:
            follower.start()
            yield AdapterStorage(catalog, store, cache)


def note_position(folder: Path, position: Position) -> None:
    """Note the catalog's position in the store's folder, after every commit. Not flushed: where power was lost, or the
    server killed meanwhile, another one, or none, is found, and every blob is looked at. Written over what is there:
    ext4 flushes a file that was emptied first as it is closed.
    """
    path = folder / _POSITION
    with suppress(OSError):
        path.touch(FILE_MODE)
        with path.open("r+") as file:
            file.write(_text_of(position))
            file.truncate()


def is_noted(folder: Path, position: Position) -> bool:
    """True if the position was noted last."""
    try:
        return read_regular(folder / _POSITION, 1000).decode() == _text_of(position)
    except (OSError, UnicodeDecodeError):
        return False


def _text_of(position: Position) -> str:
    return f"{position.epoch} {position.generation} {position.head}" if position.epoch else "none"


def _disk_store(config: AdapterConfig, folder: Path, is_cache: bool = False) -> DiskStore:
    try:
        return DiskStore(folder, config.adapter_disk_memory, is_cache=is_cache, policy=config.adapter_eviction)
    except OSError as error:
        found = Path(error.filename or folder)
        said = f"{found.name}: {words_of(error)}; move it away"
        raise ConfigError(f"--store {found.parent}: {said}") from None


def _replenish(store: TieredStore, catalog: Catalog) -> None:
    """Restores blobs that Redis has lost and this machine has."""
    with suppress(AdapterUnavailableError):  # away again; its return is another chance
        store.replenish(catalog.snapshot.digests)
        sync_records(store.far, catalog.ledger.state)
