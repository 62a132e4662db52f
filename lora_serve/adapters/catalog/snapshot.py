"""The catalog at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from lora_serve.adapters.catalog.entry import CatalogEntry, tenant_of
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.core.adapter import split_name
from lora_serve.core.errors import ForbiddenError, QuotaExceededError, UnreadableRecordError
from lora_serve.core.tenant import Quota

MENDED = "`lora-serve registry rebuild` makes it again, or the admin deletes it"

_MANY = 1000  # changed ids, beyond which everything is counted anew


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
        self, tenant: str | None, after: str | None, limit: int, seen_by: str | None = None
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


def owner_of(snapshot: Snapshot, name: str, tenant: str | None) -> str:
    """The tenant that owns an adapter, or will own it."""
    known = snapshot.entries.get(name)
    return tenant_of(name, tenant) if known is None else known.tenant


def check_allowance(snapshot: Snapshot, owner: str, name: str, digest: str, num_bytes: int, quota: Quota) -> None:
    """Raises QuotaExceededError if `owner` may not have one more version of this content and size.

    Each version counts with all of its bytes even if other tenants have the same content: a tenant must not learn from
    its own figures what others have. `digest` empty: the content is not known yet, only the number of ids is checked.
    """
    if quota.max_adapters is None and quota.max_stored_bytes is None:
        return
    own = [entry for entry in snapshot.entries.values() if entry.tenant == owner]
    known = next((entry for entry in own if entry.name == name), None)
    if known is None and quota.max_adapters is not None and len(own) >= quota.max_adapters:
        raise QuotaExceededError(
            f"The tenant `{owner}` has {len(own)} adapters and may have {quota.max_adapters}: delete one first."
        )
    if known is not None and digest in {version.digest for version in known.versions}:
        return
    held = sum(version.num_bytes for entry in own for version in entry.versions)
    if digest and quota.max_stored_bytes is not None and held + num_bytes > quota.max_stored_bytes:
        raise QuotaExceededError(
            f"The tenant `{owner}` has {held} bytes of adapters and may have {quota.max_stored_bytes}; this version "
            f"has {num_bytes}: delete some first."
        )


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
