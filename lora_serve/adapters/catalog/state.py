"""The catalog at one moment, as its journal's records tell it: a snapshot for readers, leases on blobs, lineage."""

from __future__ import annotations

import bisect
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lora_serve.adapters.catalog.entry import CatalogEntry, document_of, entry_of
from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.ledger import Changes, Ledger
from lora_serve.core.adapter import is_adapter_id, split_name
from lora_serve.core.errors import ForbiddenError, UnreadableRecordError

ADAPTER, ALIAS, BLOB = "adapter:", "alias:", "blob:"
LINEAGE = "mark:"  # in every registry that was written to: where it is missing all records are
MAX_EPOCHS = 50
UNREADABLE = "?"  # the holder of a lease that cannot be read
LEASE_SECONDS = 3600.0  # a replica that is gone loses its leases after this time
MENDED = "`lora-serve registry rebuild` makes it again, or the admin deletes it"
_MANY = 1000  # changed ids, beyond which everything is counted anew
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries by name, aliases, and indexes over them."""

    position: Position
    entries: Mapping[str, CatalogEntry]
    aliases: Mapping[str, str]  # name -> `id` or `id@selector`
    names: tuple[str, ...]  # the ids, sorted
    named: Mapping[str, int]  # digest -> how many versions name it, at least one
    pinned: frozenset[str]  # ids
    held: frozenset[str] = frozenset()  # ids and aliases whose records cannot be read: neither there nor free
    num_gone: int = field(default=0, compare=False)  # how often, since the opening, a digest was no longer named

    @classmethod
    def of(
        cls,
        position: Position,
        entries: Mapping[str, CatalogEntry],
        aliases: Mapping[str, str],
        unreadable: Collection[str] = (),
    ) -> Snapshot:
        """The snapshot of these entries. `unreadable`: names of which the newest record cannot be read; one of which an
        older record is known goes on with that.
        """
        named = Counter([version.digest for entry in entries.values() for version in entry.versions])
        pinned = frozenset(entry.name for entry in entries.values() if entry.pinned)
        held = frozenset(name for name in unreadable if name not in entries and name not in aliases)
        return cls(position, entries, aliases, tuple(sorted(entries)), named, pinned, held)

    def after(
        self,
        position: Position,
        entries: Mapping[str, CatalogEntry],
        aliases: Mapping[str, str],
        names: Set[str],
        unreadable: Collection[str] = (),
    ) -> Snapshot:
        """The snapshot of other entries, which differ for these names only: nothing else is counted again."""
        if len(names) > _MANY:
            return replace(Snapshot.of(position, entries, aliases, unreadable), num_gone=self.num_gone + 1)
        known, named, num_gone = list(self.names), dict(self.named), self.num_gone
        for name in names:
            old, new = self.entries.get(name), entries.get(name)
            for version in new.versions if new else ():
                named[version.digest] = named.get(version.digest, 0) + 1
            for version in old.versions if old else ():
                named[version.digest] -= 1
                if not named[version.digest]:
                    del named[version.digest]
                    num_gone += 1
            if old is None and new is not None:
                bisect.insort(known, name)
            elif new is None and old is not None:
                del known[bisect.bisect_left(known, name)]
        pinned = self.pinned - names | {name for name in names if name in entries and entries[name].pinned}
        held = frozenset(name for name in unreadable if name not in entries and name not in aliases)
        return Snapshot(position, entries, aliases, tuple(known), named, pinned, held, num_gone)

    @property
    def digests(self) -> Set[str]:
        """All that a version names."""
        return self.named.keys()

    def held_for(self, tenant: str | None) -> list[str]:
        """The held names that `tenant` (None: a caller that sees all) may be shown, sorted: those of its namespace."""
        return sorted(name for name in self.held if tenant is None or name.startswith(f"{tenant}/"))

    def check_held(self, name: str, tenant: str | None = None) -> None:
        """Raises UnreadableRecordError for a held name, unless it lies in another tenant's namespace."""
        if name in self.held and (tenant is None or "/" not in name or name.startswith(f"{tenant}/")):
            raise UnreadableRecordError(
                f"The record of the name `{name}` cannot be read: it is held until {MENDED}.", 60
            )

    def page(
        self, tenant: str | None = None, after: str | None = None, limit: int = 100, seen_by: str | None = None
    ) -> tuple[CatalogEntry, ...]:
        """Entries by name after `after`, at most `limit`, of `tenant` (None: any), visible to `seen_by` (None: all)."""
        start = bisect.bisect_right(self.names, after) if after is not None else 0
        found: list[CatalogEntry] = []
        for name in self.names[start:]:
            if len(found) >= limit:
                break
            entry = self.entries[name]
            if (tenant is None or entry.tenant == tenant) and entry.is_visible_to(seen_by):
                found.append(entry)
        return tuple(found)

    def aliases_of(self, name: str) -> dict[str, str]:
        """The aliases that lead to an id, with their targets, sorted by name."""
        return dict(sorted(pair for pair in self.aliases.items() if split_name(pair[1])[0] == name))

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes that each named digest takes in host memory."""
        return {v.digest: v.num_bytes for entry in self.entries.values() for v in entry.versions}


def check_pinned(snapshot: Snapshot, entry: CatalogEntry, max_bytes: int) -> None:
    """Raises ForbiddenError if pinning `entry` would take its tenant beyond `max_bytes` of pinned versions."""
    others = (one for one in snapshot.entries.values() if one.tenant == entry.tenant and one.name != entry.name)
    pinned = [entry, *(one for one in others if one.pinned)]
    needed = sum(version.num_bytes for one in pinned for version in one.routed)
    if needed > max_bytes:
        raise ForbiddenError(
            f"With this one, {needed} bytes would be pinned; {max_bytes} bytes of device memory are guaranteed to "
            f"the tenant `{entry.tenant}`."
        )


@dataclass(frozen=True, slots=True)
class BlobLease:
    """The holders of one blob, and whether it is being deleted (`condemned`)."""

    holders: Mapping[str, float]  # "<replica>:<number>" -> Unix seconds
    condemned: bool = False

    def with_holder(self, holder: str, now: float) -> BlobLease:
        return replace(self, holders={**self.holders, holder: now})

    def without(self, holder: str) -> BlobLease:
        return replace(self, holders={other: time for other, time in self.holders.items() if other != holder})

    def is_held(self, now: float) -> bool:
        """True if a lease has not expired."""
        return any(now - time < LEASE_SECONDS for time in self.holders.values())

    @property
    def text(self) -> str:
        return json.dumps({"holders": dict(self.holders), "condemned": self.condemned})


def lease_of(text: str | None) -> BlobLease:
    """The lease that a journal's text describes; None: no lease. An unreadable one may be any replica's, and a
    deletion may be under way: the blob is neither leased nor freed for as long as leases last.
    """
    if text is None:
        return BlobLease({})
    try:
        fields = json.loads(text)
        return BlobLease({str(key): float(time) for key, time in fields["holders"].items()}, bool(fields["condemned"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return BlobLease({UNREADABLE: time.time()}, condemned=True)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The past of a catalog.

    `gaps`: generations (first, last) that it has not lived through, as it was rebuilt from what was found. `epochs`:
    all that it had; a journal whose position was lost continues under a new one.
    """

    gaps: tuple[tuple[int, int], ...] = ()
    epochs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogState:
    """The snapshot that readers see, and the records that only the catalog itself reads."""

    snapshot: Snapshot = field(default_factory=lambda: Snapshot.of(Position(), {}, {}))
    leases: Mapping[str, BlobLease] = field(default_factory=dict)  # by digest
    unreadable: frozenset[str] = frozenset()  # ids and aliases whose records cannot be read
    lineage: Lineage | None = None  # None: no record of it; older versions wrote none

    @staticmethod
    def of(page: Page) -> CatalogState:
        """The state of a page that holds all records."""
        return CatalogState().after(page)

    def after(self, page: Page) -> CatalogState:
        """The state once these records have changed. A record that cannot be read changes nothing."""
        snapshot, kinds = self.snapshot, {key[: key.find(":") + 1] for key in page.records}
        entries, aliases, leases = snapshot.entries, snapshot.aliases, self.leases
        entries = dict(entries) if ADAPTER in kinds else entries  # what a commit leaves alone is not copied
        aliases = dict(aliases) if ALIAS in kinds else aliases
        leases = dict(leases) if BLOB in kinds else leases
        unreadable, changed = set(self.unreadable), set[str]()
        tables: dict[str, Any] = {ADAPTER: entries, ALIAS: aliases, BLOB: leases}
        for key, text in page.records.items():
            end = key.find(":") + 1
            kind, name = key[:end], key[end:]
            is_read = _put(kind, name, text, tables)
            if kind in (ADAPTER, ALIAS):
                (unreadable.discard if is_read else unreadable.add)(name)
                if entries.get(name) != snapshot.entries.get(name):
                    changed.add(name)
        if changed or aliases != snapshot.aliases or unreadable != self.unreadable:
            snapshot = snapshot.after(page.position, entries, aliases, changed, unreadable)
        else:
            snapshot = replace(snapshot, position=page.position)
        for name in sorted(snapshot.held - self.snapshot.held):
            what = "requests get a 503, nobody registers it, and its blobs stay"
            _log.error("the record of the adapter %r cannot be read: %s, until %s", name[:200], what, MENDED)
        lineage = lineage_of(page.records[LINEAGE]) if LINEAGE in page.records else self.lineage
        return CatalogState(snapshot, leases, frozenset(unreadable), lineage)

    @property
    def position(self) -> Position:
        return self.snapshot.position

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The generations that this catalog has not lived through."""
        return self.lineage.gaps if self.lineage else ()

    @property
    def epochs(self) -> tuple[str, ...]:
        """All epochs of the catalog, the present one last."""
        earlier = self.lineage.epochs if self.lineage else ()
        last = self.position.epoch
        return (*(epoch for epoch in earlier if epoch not in ("", last)), *([last] if last else []))

    def with_lineage(self, changes: Changes) -> Changes:
        """The changes, with the lineage if its record lacks the present epoch."""
        if self.lineage is not None and self.position.epoch in self.lineage.epochs:
            return changes
        return {**changes, **lineage_change(Lineage(self.gaps, self.epochs))}

    def lease_on(self, digest: str) -> BlobLease:
        return self.leases.get(digest, BlobLease({}))

    def leased_by(self, holder: str, digest: str, now: float) -> Changes:
        """The change that adds a holder to a blob."""
        return lease_change(digest, self.lease_on(digest).with_holder(holder, now))


class CatalogLedger(Ledger[CatalogState]):
    """The catalog's ledger: whatever is changed, its lineage is in the journal too."""

    def change(self, edit: Callable[[CatalogState], tuple[Changes, T]]) -> T:
        def edit_and_record(state: CatalogState) -> tuple[Changes, T]:
            changes, result = edit(state)
            return (state.with_lineage(changes) if changes else {}), result

        return super().change(edit_and_record)


def lineage_change(lineage: Lineage) -> Changes:
    """The change that writes the lineage."""
    return {LINEAGE: json.dumps({"gaps": lineage.gaps, "epochs": lineage.epochs[-MAX_EPOCHS:]})}


def lineage_of(text: str | None) -> Lineage | None:
    """The lineage that a journal's text describes; None: there is no text."""
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


def lease_change(digest: str, lease: BlobLease) -> Changes:
    """The change that writes a lease; one without content is removed."""
    return {BLOB + digest: lease.text if lease.holders or lease.condemned else None}


def _put(kind: str, name: str, text: str | None, tables: Mapping[str, Any]) -> bool:
    """True if the record could be read. The table of its kind is a copy, to be changed."""
    if text is None:
        tables.get(kind, {}).pop(name, None)
    elif kind == ADAPTER:
        entry = entry_of(text)
        if entry is None or entry.name != name:
            return False
        tables[kind][name] = entry
    elif kind == ALIAS:
        if not is_adapter_id(split_name(text)[0]):
            return False
        tables[kind][name] = text
    elif kind == BLOB:
        tables[kind][name] = lease_of(text)
    return True
