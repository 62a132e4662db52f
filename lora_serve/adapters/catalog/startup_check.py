"""Refuses to start on a catalog that cannot be the one under which the blobs beside it were written.

Such a catalog was lost and begun anew, set back to an older copy, or belongs to another store. A server that ran on it
would silently drop adapters and give their ids away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import BlobRecord, read_records, record_of
from lora_serve.adapters.catalog.history import CatalogHistory
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.regular_file import read_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import BLOB_NAME
from lora_serve.adapters.stores.files import FILE_MODE, listed
from lora_serve.core.errors import AdapterUnavailableError, ConfigError

_POSITION = "position"  # the name of a file


def check_catalog_exists(catalog: Path, blobs: Path, flag: str) -> None:
    """Check, before any file is made, that no catalog is begun anew beside blobs. Raises ConfigError."""
    there = any(path.is_file() and path.stat().st_size for path in (catalog, catalog.with_name(f"{catalog.name}-wal")))
    if not there and not (os.path.lexists(catalog) and not catalog.is_file()):
        _check_begun(sum(1 for path in listed(blobs) if BLOB_NAME.match(path.name)), flag)


def check_own_catalog(state: CatalogState, store: AdapterStore, flag: str, folder: Path | None = None) -> None:
    """Check the catalog of a store that only this server writes. `flag`: names the registry. Raises ConfigError.

    `folder`: the store's; a catalog at the very position that was noted there last needs no look at every blob.
    """
    if folder is not None and _noted_position(folder) == _text_of(state.position):
        return
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


def _noted_position(folder: Path) -> str:
    try:
        return read_regular(folder / _POSITION, 1000).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _text_of(position: Position) -> str:
    return f"{position.epoch} {position.generation} {position.head}" if position.epoch else "none"


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
