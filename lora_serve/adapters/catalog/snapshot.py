"""The catalog at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.core.adapter import split_name
from lora_serve.core.errors import UnreadableRecordError

MENDED = "`lora-serve registry rebuild` makes it again, or the admin deletes it"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries by name, aliases, and indexes over them."""

    position: Position
    entries: Mapping[str, CatalogEntry]
    aliases: Mapping[str, str]  # name -> `id` or `id@selector`
    names: tuple[str, ...]  # the ids, sorted
    digests: frozenset[str]  # all that a version names
    held: frozenset[str] = frozenset()  # ids and aliases whose records cannot be read: neither there nor free

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
        digests = frozenset([version.digest for entry in entries.values() for version in entry.versions])
        held = frozenset(unreadable) - entries.keys() - aliases.keys()
        return cls(position, entries, aliases, tuple(sorted(entries)), digests, held)

    def held_for(self, tenant: str | None) -> list[str]:
        """The held names, sorted. A tenant (None: a caller that sees all) is told of none in another's namespace."""
        return sorted(n for n in self.held if tenant is None or "/" not in n or n.startswith(f"{tenant}/"))

    def check_held(self, name: str, tenant: str | None = None) -> None:
        """Raises UnreadableRecordError for a held name that `tenant` is told of."""
        if name in self.held and name in self.held_for(tenant):
            raise UnreadableRecordError(
                f"The record of the adapter `{name}` cannot be read: it is held until {MENDED}.", 60
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
