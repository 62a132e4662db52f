"""What a start does with blobs that nothing names: those that the catalog let go are freed, the others kept aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from lora_serve.adapters.catalog.blob_writer import sync_records
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.history import CatalogHistory
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import listed, private_or_later, remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError

_MAX_NAMED = 10  # digests in one line of the log
_log = logging.getLogger(__name__)


def sweep_store(
    catalog: Catalog, store: AdapterStore, config: AdapterConfig, collect: Callable[[str, str], bool]
) -> None:
    """Before anything else changes catalog or store. `collect`: ends a hold and frees its blob. Raises
    AdapterUnavailableError.
    """
    own = store.near if isinstance(store, TieredStore) else store
    state = catalog.ledger.state
    history = CatalogHistory(state, catalog.is_shared)
    # Without an epoch it is not even known whether anything is named.
    named = state.snapshot.digests if state.position.epoch else own.digests()
    if num_aside := _swept(store, named, history, config):
        _log.warning(
            "blobs that the catalog does not know are kept aside in %s: %d (%s); `lora-serve registry rebuild` brings "
            "back what they were",
            config.store,
            num_aside,
            _named_aside(own),
        )
    leftovers = catalog.leases.expired()
    records = _records_of(store, leftovers)
    for digest, holder in leftovers.items():
        if history.may_delete(digest, records.get(digest, {}), {}):
            with suppress(AdapterUnavailableError):  # it is owed from then on
                collect(digest, holder)
    with suppress(AdapterUnavailableError):  # what is away is caught up with once it is back
        catalog.record_lineage()
        sync_records(own, catalog.ledger.state)


def _named_aside(store: AdapterStore) -> str:
    digests = sorted({digest for digest, _ in store.orphans.all()}) if isinstance(store, DiskStore) else []
    more = f" and {len(digests) - _MAX_NAMED} more" if len(digests) > _MAX_NAMED else ""
    return ", ".join(digests[:_MAX_NAMED]) + more


def _swept(store: AdapterStore, named: frozenset[str], history: CatalogHistory, config: AdapterConfig) -> int:
    """How many blobs are aside."""
    try:
        for folder in listed(private_or_later(config.store / "tmp")):
            remove_folder(folder)
        return store.sweep(named, history.may_delete, config.unnamed_days)
    except OSError as error:
        _log.warning("what an earlier life left over stays until the next start: %s", words_of(error))
        return 0


def _records_of(store: AdapterStore, digests: Collection[str]) -> dict[str, dict[str, str]]:
    try:
        return store.records(digests) if digests else {}
    except AdapterUnavailableError:
        return {}
