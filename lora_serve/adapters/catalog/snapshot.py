"""The catalog at one moment: immutable, so that any thread may read it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.core.adapter import split_name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries by name, aliases, and what can be said of them all."""

    position: Position
    entries: Mapping[str, CatalogEntry]
    aliases: Mapping[str, str]  # name -> `id` or `id@selector`
    names: tuple[str, ...]  # of the entries, sorted
    digests: frozenset[str]  # named by any version

    @staticmethod
    def of(position: Position, entries: Mapping[str, CatalogEntry], aliases: Mapping[str, str]) -> Snapshot:
        """The snapshot of these entries."""
        digests = frozenset(version.digest for entry in entries.values() for version in entry.versions)
        return Snapshot(position, entries, aliases, tuple(sorted(entries)), digests)

    def page(
        self, tenant: str | None, after: str | None, limit: int, seen_by: str | None = None
    ) -> tuple[CatalogEntry, ...]:
        """Entries by name, those after `after`, at most `limit`; None: of any tenant, seen by whoever sees all."""
        start = bisect.bisect_right(self.names, after) if after is not None else 0
        found: list[CatalogEntry] = []
        for name in self.names[start:]:
            if len(found) >= limit:
                break
            entry = self.entries[name]
            if (tenant is None or entry.tenant == tenant) and entry.is_visible_to(seen_by):
                found.append(entry)
        return tuple(found)

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """The aliases that lead to an id, sorted."""
        return tuple(sorted(alias for alias, target in self.aliases.items() if split_name(target)[0] == name))
