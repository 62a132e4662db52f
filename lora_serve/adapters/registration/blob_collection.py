"""Frees blobs that nothing names and nobody holds; what could not be freed is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.core.errors import AdapterUnavailableError


class BlobCollector:
    """Every method may be called from any thread."""

    def __init__(self, catalog: Catalog, store: AdapterStore) -> None:
        self._catalog = catalog
        self._store = store
        self._pending: set[tuple[str, str]] = set()  # digests whose deletion failed, and whose hold it would have ended

    @property
    def has_pending(self) -> bool:
        """Whether `retry_pending` has anything to do."""
        return bool(self._pending)

    @contextmanager
    def held(self, digest: str) -> Iterator[str]:
        """A hold of the blob, which the catalog ends when it names it; without that, no bytes stay behind."""
        holder = self._catalog.leases.acquire(digest)
        try:
            yield holder
        except BaseException:
            with suppress(AdapterUnavailableError):  # `retry_pending` tries again
                self.collect(digest, holder)
            raise

    def collect(self, digest: str, holder: str) -> bool:
        """End a hold; delete the blob unless a version names it or somebody else holds it.

        Whether it was deleted; this server's own copy goes if nothing names it. Raises AdapterUnavailableError: then
        `retry_pending` does it some time.
        """
        try:
            is_gone = self._collect(digest, holder)
        except AdapterUnavailableError:
            self._pending.add((digest, holder))
            raise
        self._pending.discard((digest, holder))
        return is_gone

    def retry_pending(self) -> None:
        """Try again what could not be done: a disk, or a Redis, that was away may be back."""
        for digest, holder in list(self._pending):
            with suppress(AdapterUnavailableError):
                self.collect(digest, holder)

    def _collect(self, digest: str, holder: str) -> bool:
        if not self._catalog.leases.release(digest, holder):
            if digest not in self._catalog.snapshot.digests:
                self._store.release(digest)
            return False
        try:
            self._store.delete(digest)
            self._catalog.leases.deleted(digest)
        except BaseException:
            self._catalog.leases.deletion_failed(digest)
            raise
        return True
