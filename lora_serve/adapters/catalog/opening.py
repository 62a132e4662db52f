"""Opens the catalog that the settings name: this server's own, or one that replicas share."""

from __future__ import annotations

import functools
import importlib
import uuid
from contextlib import closing
from pathlib import Path

from lora_serve.adapters.catalog.branches import merge_branches
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.journals.mirror import open_mirror
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.regular_file import read_regular
from lora_serve.adapters.stores.files import FILE_MODE, UNWRITABLE, flush
from lora_serve.adapters.stores.lock import StoreLock, lock_store
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, DamagedFileError, how_to_install

CATALOG_NAME, MIRROR_NAME = "catalog.sqlite3", "mirror.sqlite3"


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
