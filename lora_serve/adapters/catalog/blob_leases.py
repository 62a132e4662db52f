"""Leases on blobs that no version names (yet, or any more): taken by those that write or still use them.

A lease is noted before the blob is written. A blob is deleted only when no version names it and none leases it, and
none can lease it while it is being deleted. So no crash leaves bytes behind for good, and no replica deletes what
another one is about to name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from lora_serve.adapters.catalog.blob_records import BlobRecord, digests_of, key_of, record_of
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.ledger import Changes, Ledger
from lora_serve.adapters.catalog.state import BlobLease, CatalogState, lease_change
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.core.errors import AdapterUnavailableError

WAIT_SECONDS = 1.0  # a registration waits for a deletion of the same bytes
_PAUSE = 0.05


class BlobLeases:
    """This server's leases. Every method may be called from any thread, and raises AdapterUnavailableError."""

    def __init__(self, replica: str, ledger: Ledger[CatalogState]) -> None:
        """`replica`: the server's name, which outlives it."""
        self._ledger = ledger
        self.drain_holder = f"{replica}:drain"  # leases removed blobs until no row here uses them
        self._replica = replica
        self._born = time.time_ns()
        self._numbers = itertools.count(self._born)
        self._deleting: set[str] = set()  # digests whose bytes this server is deleting now

    @property
    def state(self) -> CatalogState:
        """The newest known state."""
        return self._ledger.state

    def new_holder(self) -> str:
        """A name that no holder has had."""
        return f"{self._replica}:{next(self._numbers)}"

    def acquire(self, digest: str, holder: str | None = None, wait_seconds: float = WAIT_SECONDS) -> str:
        """Note that the store is about to get `digest`; returns the holder's name. `holder` None: a new one.

        Waits, `wait_seconds` at most, for a deletion of the same bytes that is under way. After an error the lease may
        have been noted all the same: the caller, who named the holder, can release it.
        """
        name = holder or self.new_holder()

        def edit(state: CatalogState) -> tuple[Changes, bool]:
            lease = state.lease_on(digest)
            if lease.condemned and not self._has_failed_to_delete(digest, lease):
                return {}, False
            return lease_change(digest, replace(lease, condemned=False).with_holder(name, time.time())), True

        deadline = time.monotonic() + wait_seconds
        while not self._ledger.change(edit):
            if time.monotonic() > deadline:
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            time.sleep(_PAUSE)
            self._ledger.refresh()
        return name

    def drain(self, digest: str) -> None:
        """Lease a blob that no version names any more, as `drain_holder`, until this server has no use for it."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            lease = state.lease_on(digest)
            if lease.condemned or self.drain_holder in lease.holders or digest in state.snapshot.digests:
                return {}, None
            return lease_change(digest, lease.with_holder(self.drain_holder, time.time())), None

        self._ledger.change(edit)

    def release(self, digest: str, holder: str) -> bool:
        """End a lease. Returns True, and marks the blob as condemned, if no version names it and nobody else leases it:
        the caller then calls `delete`. A blob that was condemned here and not deleted is condemned again.
        """

        def edit(state: CatalogState) -> tuple[Changes, bool]:
            if digest in self._deleting:  # on another thread: all leases have ended
                return {}, False
            lease = state.lease_on(digest)
            left = lease.without(holder)
            is_unused = self._has_failed_to_delete(digest, lease) or not left.is_held(time.time())
            is_free = is_unused and digest not in state.snapshot.digests
            if is_free:
                left = BlobLease({self.drain_holder: time.time()}, condemned=True)
            return lease_change(digest, left), is_free

        with self._ledger.locked():  # no thread sees it condemned and takes its deletion for a failed one
            is_free = self._ledger.change(edit)
            if is_free:
                self._deleting.add(digest)
        return is_free

    def delete(self, digest: str, store: AdapterStore) -> None:
        """Delete a condemned blob. If that fails, the same content can be registered again; what is left of it goes
        with the next deletion, or at the next start.
        """
        try:
            store.delete(digest)
            self.deleted(digest)
        except BaseException:
            self.deletion_failed(digest)
            raise

    def deleted(self, digest: str) -> None:
        """Note that the store no longer has `digest`."""
        self._ledger.change(lambda state: (lease_change(digest, BlobLease({})), None))
        self._deleting.discard(digest)

    def expired(self, state: CatalogState) -> list[tuple[str, str]]:
        """Digests that an earlier life of this server has leased, with each holder; or replicas long gone, with ""."""
        now, found = time.time(), list[tuple[str, str]]()
        for digest, lease in state.leases.items():
            own = [holder for holder in lease.holders if self._is_earlier(holder)]
            if not own and not lease.is_held(now):
                own = [""]
            found += [(digest, holder) for holder in own]
        return found

    def is_ours(self, lease: BlobLease) -> bool:
        """True if this server holds it; what its earlier lives held is in `expired`."""
        return any(holder.startswith(f"{self._replica}:") for holder in lease.holders)

    def deletion_failed(self, digest: str) -> None:
        """Note that the blob was not deleted, and can be registered again. Raises nothing."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            lease = state.lease_on(digest)
            return lease_change(digest, replace(lease, condemned=False)) if lease.condemned else {}, None

        self._deleting.discard(digest)
        with suppress(AdapterUnavailableError):  # this server remembers; others see it once it has started again
            self._ledger.change(edit)

    def _has_failed_to_delete(self, digest: str, lease: BlobLease) -> bool:
        """True if the blob was condemned and is not being deleted: that failed here, the commit's answer was lost, or
        the replica that condemned it has been away for as long as leases last.
        """
        if not lease.condemned or digest in self._deleting:
            return False
        return lease.holders.keys() == {self.drain_holder} or not lease.is_held(time.time())

    def _is_earlier(self, holder: str) -> bool:
        replica, _, number = holder.partition(":")
        return replica == "schema-1" or (replica == self._replica and (number == "drain" or int(number) < self._born))


class BlobCollector:
    """Frees blobs that no version names and none leases. Every method may be called from any thread."""

    def __init__(self, leases: BlobLeases, store: AdapterStore) -> None:
        self._leases = leases
        self._store = store
        self._pending: set[tuple[str, str]] = set()  # digests, and holders whose leases are still to end

    @property
    def has_pending(self) -> bool:
        """True if `retry_pending` has anything to do."""
        return bool(self._pending)

    @contextmanager
    def leased(self, digest: str) -> Iterator[str]:
        """A lease on the blob; the catalog's commit of a version ends it. After an error the blob is freed."""
        holder = self._leases.new_holder()
        try:
            self._leases.acquire(digest, holder)
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
        if digests_of(self._store, self._leases.state.unreadable, [digest]):  # it may be named: its lease stays
            return False
        if not self._leases.release(digest, holder):
            if digest not in self._leases.state.snapshot.digests:
                self._store.release(digest)
            return False
        self._leases.delete(digest, self._store)
        return True


@dataclass(frozen=True, slots=True)
class CatalogHistory:
    """The past of a catalog, as of one state."""

    state: CatalogState
    is_shared: bool = False  # the blobs are this machine's copies; other replicas free blobs without a record here

    def may_delete(self, digest: str, records: Mapping[str, str], tombstones: Mapping[str, str]) -> bool:
        """True if an unnamed blob may be deleted. `records` beside it, and `tombstones` of removed ones, by key."""
        if tombstones and not records:  # whichever catalog it was: every id that named the blob let it go
            return True
        found = [record_of(text) for text in records.values()]
        if not all(record is not None and self.includes(record.position) for record in found):
            return False
        if {key_of(name) for name in self.state.unreadable} & records.keys():
            return False
        if digest in self.state.leases:
            return True
        # Blobs that this server freed have a lease or a tombstone. One that died between a commit and its record left a
        # copy without a record, which another replica may have freed since; nothing brings back a copy without a name.
        return self.is_shared and (bool(found) or not self.state.unreadable)

    def was_deleted(self, record: BlobRecord) -> bool:
        """True if the id of a record in the catalog's own store was deleted on purpose."""
        noted = any(version.digest in self.state.leases for version in record.entry.versions)
        return noted and self.includes(record.position) and record.entry.name not in self.state.unreadable

    def includes(self, position: Position) -> bool:
        """True if this catalog once was at that position."""
        own, gaps = self.state.position, self.state.gaps
        is_own = bool(own.epoch) and position.epoch == own.epoch and position.generation <= own.generation
        return is_own and not any(first <= position.generation <= last for first, last in gaps)

    def is_ahead(self, record: BlobRecord) -> bool:
        """True if a record was written later in the life of this very registry, which was set back since."""
        own, position = self.state.position, record.position
        if not own.epoch or position.epoch == own.epoch:
            return bool(own.epoch) and position.generation > own.generation
        return own.epoch in record.epochs and position.epoch not in self.state.epochs
