"""A journal's records, understood: entries, aliases and leases about blobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.catalog.blob_notes import BlobLeaseRecord, lease_record_of
from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.snapshot import Snapshot

ADAPTER, ALIAS, BLOB = "adapter:", "alias:", "blob:"
LINEAGE = "mark:"  # in every registry that was written to: where it is missing all records are
MAX_EPOCHS = 50
Gaps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Lineage:
    """`gaps`: generations (first, last) that this catalog has not lived through, since it was made again from what was
    found. `epochs`: that it has gone through; a journal whose position was lost goes on under another.
    """

    gaps: Gaps = ()
    epochs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogState:
    """What the catalog's only writer works on: the snapshot that readers see, and the leases that they do not."""

    snapshot: Snapshot = field(default_factory=lambda: Snapshot.of(Position(), {}, {}))
    leases: Mapping[str, BlobLeaseRecord] = field(default_factory=dict)  # by digest
    unreadable: frozenset[str] = frozenset()  # ids whose records make no sense
    lineage: Lineage | None = None  # None: there is none

    @staticmethod
    def of(page: Page) -> CatalogState:
        """The state of a page that holds all records."""
        return CatalogState().after(page)

    def after(self, page: Page) -> CatalogState:
        """The state once these records have changed. A record that cannot be read changes nothing."""
        entries, aliases, leases = dict(self.snapshot.entries), dict(self.snapshot.aliases), dict(self.leases)
        unreadable = set(self.unreadable)
        for key, text in page.records.items():
            kind, colon, name = key.partition(":")
            is_read = _put(kind + colon, name, text, entries, aliases, leases)
            if kind + colon == ADAPTER:
                (unreadable.discard if is_read else unreadable.add)(name)
        if entries == self.snapshot.entries and aliases == self.snapshot.aliases:
            old = self.snapshot
            snapshot = Snapshot(page.position, old.entries, old.aliases, old.names, old.digests)
        else:
            snapshot = Snapshot.of(page.position, entries, aliases)
        lineage = lineage_of(page.records[LINEAGE]) if LINEAGE in page.records else self.lineage
        return CatalogState(snapshot, leases, frozenset(unreadable), lineage)

    @property
    def position(self) -> Position:
        return self.snapshot.position

    @property
    def has_lineage(self) -> bool:
        """Whether the registry has its mark; older versions wrote none."""
        return self.lineage is not None

    @property
    def epochs(self) -> tuple[str, ...]:
        """Those that the registry has gone through, the present one last."""
        earlier = self.lineage.epochs if self.lineage else ()
        last = self.position.epoch
        return (*(epoch for epoch in earlier if epoch not in ("", last)), *([last] if last else []))

    def with_lineage(self, changes: Changes) -> Changes:
        """The changes, and the mark if it does not say yet what it must."""
        is_said = self.lineage is not None and self.position.epoch in self.lineage.epochs
        return (
            changes
            if is_said
            else {**changes, **lineage_change(Lineage(self.lineage.gaps if self.lineage else (), self.epochs))}
        )

    def leases_on(self, digest: str) -> BlobLeaseRecord:
        return self.leases.get(digest, BlobLeaseRecord({}))


def lineage_change(mark: Lineage) -> Changes:
    """The change that writes the mark."""
    return {LINEAGE: json.dumps({"gaps": mark.gaps, "epochs": mark.epochs[-MAX_EPOCHS:]})}


def lineage_of(text: str | None) -> Lineage | None:
    """What a mark says; None: there is none."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
        gaps = tuple((int(first), int(last)) for first, last in fields["gaps"])
        return Lineage(gaps, tuple(map(str, fields["epochs"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Lineage()


def saved(entry: CatalogEntry) -> Changes:
    """The change that writes an entry."""
    return {ADAPTER + entry.name: document_of(entry)}


def lease_change(digest: str, note: BlobLeaseRecord) -> Changes:
    """The change that writes a note; one that says nothing is taken away."""
    return {BLOB + digest: note.text if note.holders or note.condemned else None}


def _put(
    kind: str,
    name: str,
    text: str | None,
    entries: dict[str, CatalogEntry],
    aliases: dict[str, str],
    leases: dict[str, BlobLeaseRecord],
) -> bool:
    """Whether it could be read."""
    if text is None:
        tables: dict[str, dict[str, Any]] = {ADAPTER: entries, ALIAS: aliases, BLOB: leases}
        tables.get(kind, {}).pop(name, None)
    elif kind == ADAPTER:
        entry = entry_of(text)
        if entry is None or entry.name != name:
            return False
        entries[name] = entry
    elif kind == ALIAS:
        aliases[name] = text
    elif kind == BLOB:
        leases[name] = lease_record_of(text)
    return True
