"""Whether a catalog knows of a blob: only then may its not naming the blob be a reason to delete it.

It knows what it noted itself (notes about blobs), and what was written beside the blob at a moment of its own past. A
catalog that was lost and begun anew, set back to an older copy or put in another's place knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.blob_records import BlobRecord, key_of, record_of
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.state import CatalogState


@dataclass(frozen=True, slots=True)
class CatalogHistory:
    """What the catalog knew at one moment."""

    state: CatalogState
    is_shared: bool = False  # the blobs are this machine's copies: others let go of them without leaving a word here

    def may_delete(self, digest: str, records: Mapping[str, str], tombstones: Mapping[str, str]) -> bool:
        """`records`: beside the blob; `tombstones`: of those that count no more. Both are texts by key."""
        if tombstones and not records:  # whichever catalog it was under: all that named it has let it go
            return True
        found = [record_of(text) for text in records.values()]
        if not all(record is not None and self.includes(record.position) for record in found):
            return False
        if {key_of(name) for name in self.state.unreadable} & records.keys():
            return False
        if digest in self.state.leases:
            return True
        return bool(found) and self.is_shared  # of what was let go by us there is a note, or no more than a trace

    def was_deleted(self, record: BlobRecord) -> bool:
        """Whether the id of a record that lies in the catalog's own store was deleted, and is no loss."""
        noted = any(version.digest in self.state.leases for version in record.entry.versions)
        return noted and self.includes(record.position) and record.entry.name not in self.state.unreadable

    def includes(self, position: Position) -> bool:
        """Whether this catalog was there once."""
        own, gaps = self.state.position, self.state.lineage.gaps if self.state.lineage else ()
        is_own = bool(own.epoch) and position.epoch == own.epoch and position.generation <= own.generation
        return is_own and not any(first <= position.generation <= last for first, last in gaps)

    def is_ahead(self, record: BlobRecord) -> bool:
        """Whether a record was written later in the life of this very registry, which was set back since."""
        own, position = self.state.position, record.position
        if not own.epoch or position.epoch == own.epoch:
            return bool(own.epoch) and position.generation > own.generation
        return own.epoch in record.epochs and position.epoch not in self.state.epochs
