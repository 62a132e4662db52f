"""Frees blobs that no version names and nobody leases, and sorts out the blobs that a start finds unnamed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import digests_of, synced_records
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import listed, private_or_later, remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError

_MAX_NAMED = 10  # digests in one line of the log
_log = logging.getLogger(__name__)


class BlobCollector:
    """Every method may be called from any thread."""

    def __init__(self, catalog: Catalog, store: AdapterStore) -> None:
        self._catalog = catalog
        self._store = store
        self._pending: set[tuple[str, str]] = set()  # digests, and holders whose leases are still to end

    @property
    def has_pending(self) -> bool:
        """True if `retry_pending` has anything to do."""
        return bool(self._pending)

    @contextmanager
    def leased(self, digest: str) -> Iterator[str]:
        """A lease on the blob; the catalog's commit of a version ends it. After an error the blob is freed."""
        holder = self._catalog.leases.new_holder()
        try:
            self._catalog.leases.acquire(digest, holder)
        except AdapterUnavailableError:  # only the answer of its commit may have been lost
            self._pending.add((digest, holder))
            raise
        try:
            yield holder
        except BaseException:
            with suppress(AdapterUnavailableError):  # `retry_pending` tries again
                self.collect(digest, holder)
            raise

    def collect(self, digest: str, holder: str) -> bool:
        """End a lease; delete the blob unless a version names it or somebody else leases it.

        Returns whether it was deleted; this server's own copy is dropped if no version names it. Raises
        AdapterUnavailableError; `retry_pending` then tries again.
        """
        try:
            is_gone = self._collect(digest, holder)
        except AdapterUnavailableError:
            self._pending.add((digest, holder))
            raise
        self._pending.discard((digest, holder))
        return is_gone

    def retry_pending(self) -> None:
        """Retry what failed: the disk, or Redis, may be back."""
        for digest, holder in list(self._pending):
            with suppress(AdapterUnavailableError):
                self.collect(digest, holder)

    def _collect(self, digest: str, holder: str) -> bool:
        if digests_of(self._store, self._catalog.ledger.state.unreadable, [digest]):  # it may be named: its lease stays
            return False
        if not self._catalog.leases.release(digest, holder):
            if digest not in self._catalog.snapshot.digests:
                self._store.release(digest)
            return False
        self._catalog.leases.delete(digest, self._store)
        return True


def sweep_store(
    catalog: Catalog, store: AdapterStore, config: AdapterConfig, collect: Callable[[str, str], bool]
) -> Generator[None, None, None]:
    """Free the unnamed blobs that the catalog let go, and keep the others aside, piece by piece.

    The first piece, what an earlier life of this server left, comes before anything else changes catalog or store. The
    others may run beside registrations: whoever writes a blob has leased it, and a blob is moved while the ledger is
    held, so that nobody can lease it meanwhile. `collect`: ends a lease and frees its blob.
    """
    own = store.near if isinstance(store, TieredStore) else store
    assert isinstance(own, DiskStore), "blobs are swept on this machine only"
    with _unwritable_till_next_start():
        for folder in (*listed(private_or_later(config.store / "tmp")), *listed(own.tmp)):
            remove_folder(folder)
        state = catalog.ledger.state
        expired = catalog.leases.expired(state)
        history = CatalogHistory(state, catalog.is_shared)
        if state.position.epoch:  # without one the catalog cannot tell whether anything is named
            for digest in {digest for digest, _ in expired}:
                own.sweep_blob(digest, _may_be_named(own, state, digest), history.may_delete)
        records = _records_of(store, {digest for digest, _ in expired})
        for digest, holder in expired:
            if history.may_delete(digest, records.get(digest, {}), {}):
                with suppress(AdapterUnavailableError):  # the collector retries later
                    collect(digest, holder)
    with suppress(AdapterUnavailableError):  # an unreachable store is synchronised when it is back
        catalog.record_lineage()
    yield
    if not state.position.epoch:
        return
    with _unwritable_till_next_start():
        yield from _swept(own, catalog, config)
    with suppress(AdapterUnavailableError):
        yield from synced_records(own, catalog.ledger)


def _may_be_named(own: DiskStore, state: CatalogState, digest: str) -> bool:
    return digest in state.snapshot.digests or bool(digests_of(own, state.unreadable, [digest]))


def _swept(own: DiskStore, catalog: Catalog, config: AdapterConfig) -> Iterator[None]:
    for digest in own.digests():
        if digest not in catalog.snapshot.digests or not own.is_well_formed(digest):
            with catalog.ledger.held() as state:
                if not catalog.leases.is_ours(state.lease_on(digest)):
                    history = CatalogHistory(state, catalog.is_shared)
                    own.sweep_blob(digest, _may_be_named(own, state, digest), history.may_delete)
        yield
    own.orphans.expire(config.unnamed_blob_days)
    if digests := sorted({digest for digest, _ in own.orphans.all()}):
        more = f" and {len(digests) - _MAX_NAMED} more" if len(digests) > _MAX_NAMED else ""
        _log.warning(
            "blobs that the catalog does not know are kept aside in %s: %d (%s); `lora-serve registry rebuild` brings "
            "back what they were",
            config.store,
            len(digests),
            ", ".join(digests[:_MAX_NAMED]) + more,
        )


@contextmanager
def _unwritable_till_next_start() -> Iterator[None]:
    try:
        yield
    except (OSError, AdapterUnavailableError) as error:
        said = words_of(error) if isinstance(error, OSError) else error
        _log.warning("what an earlier life left over stays until the next start: %s", said)


def _records_of(store: AdapterStore, digests: Collection[str]) -> dict[str, dict[str, str]]:
    try:
        return store.records(digests) if digests else {}
    except AdapterUnavailableError:
        return {}
