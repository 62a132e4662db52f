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

from lora_serve.adapters.catalog.blob_notes import BlobNote
from lora_serve.adapters.catalog.ledger import Changes, Edit
from lora_serve.adapters.catalog.state import CatalogState, noted
from lora_serve.core.errors import AdapterUnavailableError

PATIENCE = 1.0  # seconds that a registration waits for a deletion of the same bytes
_PAUSE = 0.05


class Holds:
    """This server's holds. Every method may be called from any thread, and raises AdapterUnavailableError."""

    def __init__(self, replica: str, change: Edit[CatalogState], refresh: Callable[[], None]) -> None:
        """`replica`: the server's name, which outlives it. `refresh`: bring in what others wrote."""
        self._refresh = refresh
        self.drainer = f"{replica}:drain"  # holds what was removed, until no row here uses it
        self._replica = replica
        self._change = change
        self._born = time.time_ns()
        self._numbers = itertools.count(self._born)
        self._deleting: set[str] = set()  # digests whose bytes this server is taking away now

    def take(self, digest: str, patience: float = PATIENCE) -> str:
        """Note that the store is about to get `digest`; the hold's name.

        A deletion of the same bytes that is under way is waited for, `patience` seconds at most.
        """

        def edit(state: CatalogState) -> tuple[Changes, str | None]:
            note, holder = state.note(digest), f"{self._replica}:{next(self._numbers)}"
            if note.condemned and not self._has_given_up(digest, note):
                return {}, None
            return noted(digest, replace(note, condemned=False).held_by(holder, time.time())), holder

        deadline = time.monotonic() + patience
        while (holder := self._change(edit)) is None:
            if time.monotonic() > deadline:
                raise AdapterUnavailableError("The adapter's old bytes are being deleted; try again.", retry_after=1)
            time.sleep(_PAUSE)
            self._refresh()
        return holder

    def drain(self, digest: str) -> None:
        """Hold what nothing names any more, as `drainer`, until this server has no use for it."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            note = state.note(digest)
            if note.condemned or self.drainer in note.holders or digest in state.snapshot.digests:
                return {}, None
            return noted(digest, note.held_by(self.drainer, time.time())), None

        self._change(edit)

    def condemn(self, digest: str, holder: str) -> bool:
        """End a hold. True: nobody names or holds the blob, so it is to be deleted: then `forget`, or `give_up`."""

        def edit(state: CatalogState) -> tuple[Changes, bool]:
            note = state.note(digest).without(holder)
            is_free = digest not in state.snapshot.digests and not note.is_held(time.time())
            left = BlobNote({self.drainer: time.time()}, condemned=True) if is_free else note
            if is_free:
                self._deleting.add(digest)
            return noted(digest, left), is_free

        return self._change(edit)

    def forget(self, digest: str) -> None:
        """The store no longer has `digest`."""
        self._change(lambda state: (noted(digest, BlobNote({})), None))
        self._deleting.discard(digest)

    def give_up(self, digest: str) -> None:
        """The store could not delete `digest`: whoever registers the same content may have it. Raises nothing.

        What is left of it goes with the next deletion, or at the next start.
        """

        def edit(state: CatalogState) -> tuple[Changes, None]:
            note = state.note(digest)
            return noted(digest, replace(note, condemned=False)) if note.condemned else {}, None

        self._deleting.discard(digest)
        with suppress(AdapterUnavailableError):  # this server knows, and others will once it has started again
            self._change(edit)

    def leftovers(self) -> dict[str, str]:
        """Once at start: digests of this server's earlier life, or of a replica long gone; a holder of each."""
        return self._change(lambda state: ({}, self._left_over(state)))

    def _left_over(self, state: CatalogState) -> dict[str, str]:
        now, found = time.time(), {}
        for digest, note in state.notes.items():
            own = [holder for holder in note.holders if self._is_earlier(holder)]
            if own or not note.is_held(now):
                found[digest] = own[0] if own else ""
        return found

    def _has_given_up(self, digest: str, note: BlobNote) -> bool:
        """Whether it was condemned here, by a deletion that ended without success and could not say so."""
        return digest not in self._deleting and note.holders.keys() == {self.drainer}

    def _is_earlier(self, holder: str) -> bool:
        replica, _, number = holder.partition(":")
        return replica == "schema-1" or (replica == self._replica and (number == "drain" or int(number) < self._born))
