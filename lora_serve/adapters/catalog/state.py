"""A journal's records, understood: entries, aliases and notes about blobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.adapters.catalog.blob_notes import BlobNote, note_of
from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.snapshot import Snapshot

ADAPTER, ALIAS, BLOB = "adapter:", "alias:", "blob:"
MARK = "mark:"  # in every registry that was written to: where it is missing all records are
MAX_EPOCHS = 50
Gaps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """`gaps`: generations (first, last) that this catalog has not lived through, since it was made again from what was
    found. `epochs`: that it has gone through; a journal whose position was lost goes on under another.
    """

    gaps: Gaps = ()
    epochs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogState:
    """What the catalog's only writer works on: the snapshot that readers see, and the notes that they do not."""

    snapshot: Snapshot = field(default_factory=lambda: Snapshot.of(Position(), {}, {}))
    notes: Mapping[str, BlobNote] = field(default_factory=dict)  # by digest
    unreadable: frozenset[str] = frozenset()  # ids whose records make no sense
    mark: Mark | None = None  # None: there is none

    @staticmethod
    def of(page: Page) -> CatalogState:
        """The state of a page that holds all records."""
        return CatalogState().after(page)

    def after(self, page: Page) -> CatalogState:
        """The state once these records have changed. A record that cannot be read changes nothing."""
        entries, aliases, notes = dict(self.snapshot.entries), dict(self.snapshot.aliases), dict(self.notes)
        unreadable = set(self.unreadable)
        for key, text in page.records.items():
            kind, colon, name = key.partition(":")
            is_read = _put(kind + colon, name, text, entries, aliases, notes)
            if kind + colon == ADAPTER:
                (unreadable.discard if is_read else unreadable.add)(name)
        if entries == self.snapshot.entries and aliases == self.snapshot.aliases:
            old = self.snapshot
            snapshot = Snapshot(page.position, old.entries, old.aliases, old.names, old.digests)
        else:
            snapshot = Snapshot.of(page.position, entries, aliases)
        mark = mark_of(page.records[MARK]) if MARK in page.records else self.mark
        return CatalogState(snapshot, notes, frozenset(unreadable), mark)

    @property
    def position(self) -> Position:
        return self.snapshot.position

    @property
    def is_marked(self) -> bool:
        """Whether the registry has its mark; older versions wrote none."""
        return self.mark is not None

    @property
    def epochs(self) -> tuple[str, ...]:
        """Those that the registry has gone through, the present one last."""
        earlier = self.mark.epochs if self.mark else ()
        last = self.position.epoch
        return (*(epoch for epoch in earlier if epoch not in ("", last)), *([last] if last else []))

    def with_mark(self, changes: Changes) -> Changes:
        """The changes, and the mark if it does not say yet what it must."""
        is_said = self.mark is not None and self.position.epoch in self.mark.epochs
        return changes if is_said else {**changes, **marked(Mark(self.mark.gaps if self.mark else (), self.epochs))}

    def note(self, digest: str) -> BlobNote:
        return self.notes.get(digest, BlobNote({}))


def marked(mark: Mark) -> Changes:
    """The change that writes the mark."""
    return {MARK: json.dumps({"gaps": mark.gaps, "epochs": mark.epochs[-MAX_EPOCHS:]})}


def mark_of(text: str | None) -> Mark | None:
    """What a mark says; None: there is none."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
        gaps = tuple((int(first), int(last)) for first, last in fields["gaps"])
        return Mark(gaps, tuple(map(str, fields["epochs"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Mark()


def saved(entry: CatalogEntry) -> Changes:
    """The change that writes an entry."""
    return {ADAPTER + entry.name: document_of(entry)}


def noted(digest: str, note: BlobNote) -> Changes:
    """The change that writes a note; one that says nothing is taken away."""
    return {BLOB + digest: note.text if note.holders or note.condemned else None}


def _put(
    kind: str,
    name: str,
    text: str | None,
    entries: dict[str, CatalogEntry],
    aliases: dict[str, str],
    notes: dict[str, BlobNote],
) -> bool:
    """Whether it could be read."""
    if text is None:
        tables: dict[str, dict[str, Any]] = {ADAPTER: entries, ALIAS: aliases, BLOB: notes}
        tables.get(kind, {}).pop(name, None)
    elif kind == ADAPTER:
        entry = entry_of(text)
        if entry is None or entry.name != name:
            return False
        entries[name] = entry
    elif kind == ALIAS:
        aliases[name] = text
    elif kind == BLOB:
        notes[name] = note_of(text)
    return True
