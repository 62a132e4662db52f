"""Whether a catalog can be the one under which the blobs beside it were written: if not, no server runs on it.

It was lost and begun anew, set back to an older copy, or is another store's. To serve what it says would make adapters
vanish without a word, and their ids free for others.
"""

from __future__ import annotations

import os
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import record_of
from lora_serve.adapters.catalog.history import CatalogHistory
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import BLOB_NAME
from lora_serve.adapters.stores.files import listed
from lora_serve.core.errors import AdapterUnavailableError, ConfigError


def check_catalog_exists(catalog: Path, blobs: Path, flag: str) -> None:
    """Before any file is made: no catalog is begun anew beside blobs. Raises ConfigError."""
    there = any(path.is_file() and path.stat().st_size for path in (catalog, catalog.with_name(f"{catalog.name}-wal")))
    if not there and not (os.path.lexists(catalog) and not catalog.is_file()):
        _check_begun(sum(1 for path in listed(blobs) if BLOB_NAME.match(path.name)), flag)


def check_own_catalog(state: CatalogState, store: AdapterStore, flag: str) -> None:
    """Of a store that only this server writes. `flag`: as it names the registry. Raises ConfigError."""
    digests = store.digests()
    if not state.position.epoch:
        _check_begun(len(digests), flag)
        return
    history, num_ahead = CatalogHistory(state), 0
    for records in store.records(digests).values():
        found = [record_of(text) for text in records.values()]
        num_ahead += any(record is not None and not history.includes(record.position) for record in found)
    if num_ahead:
        raise ConfigError(
            f"{flag}: the catalog is older than {num_ahead} of the {len(digests)} blobs beside it, or another store's. "
            + _ways_out(flag)
        )


def check_shared_catalog(state: CatalogState, store: AdapterStore, near: AdapterStore, flag: str) -> None:
    """Of a registry that replicas share; not while it is away. `near`: this replica's copies. Raises ConfigError."""
    _check_not_set_back(state, near, flag)
    if state.position.epoch and state.has_lineage:
        return
    try:
        digests = store.digests()
        records = store.records(digests) if state.position.epoch else {}
    except AdapterUnavailableError:
        return
    if not state.position.epoch:
        _check_begun(len(digests), flag)
    history = CatalogHistory(state)
    texts = [text for found in records.values() for text in found.values()]
    if any(record is not None and history.includes(record.position) for record in map(record_of, texts)):
        raise ConfigError(f"{flag}: the registry has lost its records of {len(digests)} blobs. {_ways_out(flag)}")


def _check_not_set_back(state: CatalogState, near: AdapterStore, flag: str) -> None:
    """A replica that kept its copy of the registry has given it back by now."""
    history, num_ahead = CatalogHistory(state), 0
    for records in near.records(near.digests()).values():
        found = [record_of(text) for text in records.values()]
        num_ahead += any(record is not None and history.is_ahead(record) for record in found)
    if num_ahead:
        raise ConfigError(f"{flag}: the registry is older than {num_ahead} of this replica's blobs. {_ways_out(flag)}")


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
