"""Decides whether a blob that the catalog does not name may be deleted: only if this catalog once knew the blob.

It knew the blob if it has a lease record of it, or if the records beside the blob were written in its own past. A
catalog that was lost and begun anew, set back to an older copy, or exchanged has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.blob_records import BlobRecord, key_of, record_of
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.state import CatalogState


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
