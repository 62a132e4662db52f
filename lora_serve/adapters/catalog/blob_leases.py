"""Who is writing, or still using, a blob that no version names: noted before it is written.

A blob is deleted only when no version names it and nobody holds it, and nobody can begin to hold it while it is being
deleted. So no crash leaves bytes behind for good, and no replica takes away what another is about to name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lora_serve.adapters.catalog.blob_notes import BlobLeaseRecord
from lora_serve.adapters.catalog.ledger import Changes, Edit
from lora_serve.adapters.catalog.state import CatalogState, lease_change
from lora_serve.core.errors import AdapterUnavailableError

WAIT_SECONDS = 1.0  # seconds that a registration waits for a deletion of the same bytes
_PAUSE = 0.05


class BlobLeases:
    """This server's holds. Every method may be called from any thread, and raises AdapterUnavailableError."""

    def __init__(self, replica: str, change: Edit[CatalogState], refresh: Callable[[], None]) -> None:
        """`replica`: the server's name, which outlives it. `refresh`: bring in what others wrote."""
        self._refresh = refresh
        self.drain_holder = f"{replica}:drain"  # holds what was removed, until no row here uses it
        self._replica = replica
        self._change = change
        self._born = time.time_ns()
        self._numbers = itertools.count(self._born)
        self._deleting: set[str] = set()  # digests whose bytes this server is taking away now

    def acquire(self, digest: str, wait_seconds: float = WAIT_SECONDS) -> str:
        """Note that the store is about to get `digest`; the hold's name.

        A deletion of the same bytes that is under way is waited for, `wait_seconds` seconds at most.
        """

        def edit(state: CatalogState) -> tuple[Changes, str | None]:
            note, holder = state.leases_on(digest), f"{self._replica}:{next(self._numbers)}"
            if note.condemned and not self._has_given_up(digest, note):
                return {}, None
            return lease_change(digest, replace(note, condemned=False).with_holder(holder, time.time())), holder

        deadline = time.monotonic() + wait_seconds
        while (holder := self._change(edit)) is None:
            if time.monotonic() > deadline:
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            time.sleep(_PAUSE)
            self._refresh()
        return holder

    def drain(self, digest: str) -> None:
        """Hold what nothing names any more, as `drain_holder`, until this server has no use for it."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            note = state.leases_on(digest)
            if note.condemned or self.drain_holder in note.holders or digest in state.snapshot.digests:
                return {}, None
            return lease_change(digest, note.with_holder(self.drain_holder, time.time())), None

        self._change(edit)

    def release(self, digest: str, holder: str) -> bool:
        """End a lease. Returns True, and marks the blob as being deleted, if no version names it and nobody else leases
        it: the caller deletes the blob, then calls `deleted` or `deletion_failed`.
        """

        def edit(state: CatalogState) -> tuple[Changes, bool]:
            note = state.leases_on(digest).without(holder)
            is_free = digest not in state.snapshot.digests and not note.is_leased(time.time())
            left = BlobLeaseRecord({self.drain_holder: time.time()}, condemned=True) if is_free else note
            if is_free:
                self._deleting.add(digest)
            return lease_change(digest, left), is_free

        return self._change(edit)

    def deleted(self, digest: str) -> None:
        """The store no longer has `digest`."""
        self._change(lambda state: (lease_change(digest, BlobLeaseRecord({})), None))
        self._deleting.discard(digest)

    def deletion_failed(self, digest: str) -> None:
        """The store could not delete `digest`: whoever registers the same content may have it. Raises nothing.

        What is left of it goes with the next deletion, or at the next start.
        """

        def edit(state: CatalogState) -> tuple[Changes, None]:
            note = state.leases_on(digest)
            return lease_change(digest, replace(note, condemned=False)) if note.condemned else {}, None

        self._deleting.discard(digest)
        with suppress(AdapterUnavailableError):  # this server may_delete, and others will once it has started again
            self._change(edit)

    def expired(self) -> dict[str, str]:
        """Once at start: digests of this server's earlier life, or of a replica long gone; a holder of each."""
        return self._change(lambda state: ({}, self._expired(state)))

    def _expired(self, state: CatalogState) -> dict[str, str]:
        now, found = time.time(), {}
        for digest, note in state.leases.items():
            own = [holder for holder in note.holders if self._is_earlier(holder)]
            if own or not note.is_leased(now):
                found[digest] = own[0] if own else ""
        return found

    def _has_given_up(self, digest: str, note: BlobLeaseRecord) -> bool:
        """Whether it was condemned here, by a deletion that ended without success and could not say so."""
        return digest not in self._deleting and note.holders.keys() == {self.drain_holder}

    def _is_earlier(self, holder: str) -> bool:
        replica, _, number = holder.partition(":")
        return replica == "schema-1" or (replica == self._replica and (number == "drain" or int(number) < self._born))
