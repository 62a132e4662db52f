"""Which adapters there are: an embedded SQLite database, and an immutable snapshot of it for readers.

One thread writes. Any thread reads the snapshot, which is replaced as a whole after each commit. No torch.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog_db import CatalogDb
from lora_serve.adapters.catalog_entry import (
    CatalogEntry,
    VersionEntry,
    adapter_row,
    check_metadata,
    check_tenant,
    entry_of,
    make_snapshot,
    tenant_of,
    version_row,
)
from lora_serve.core.adapter import AdapterRef, check_adapter_id
from lora_serve.core.errors import AdapterNotFoundError, ConflictError

_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")


class Catalog:
    """Readers: `resolve`, `entry`, `entries`, `snapshot`. Writers, on one thread only: the rest."""

    def __init__(self, store: Path) -> None:
        """Open or make STORE/catalog.sqlite3. Raises ConfigError if it cannot be used or another server has it."""
        self._db = CatalogDb(store)
        self.snapshot = make_snapshot({entry.name: entry for entry in map(entry_of, self._db.rows())})

    def resolve(self, name: str, tenant: str | None = None) -> AdapterRef:
        """`id`, `id@3` or `id@sha256:<hex>` -> reference. With `tenant`, others' adapters do not exist.

        Raises AdapterNotFoundError with the name as given.
        """
        adapter_id, at, selector = name.partition("@")
        entry = self.snapshot.entries.get(adapter_id)
        if entry is None or (tenant is not None and entry.tenant != tenant):
            raise AdapterNotFoundError(name)
        version = _select(entry, selector) if at else entry.default
        if version is None:
            raise AdapterNotFoundError(name)
        return entry.ref(version)

    def entry(self, name: str) -> CatalogEntry:
        """Raises AdapterNotFoundError."""
        entry = self.snapshot.entries.get(name)
        if entry is None:
            raise AdapterNotFoundError(name)
        return entry

    def entries(
        self, tenant: str | None = None, after: str | None = None, limit: int = 100
    ) -> tuple[CatalogEntry, ...]:
        """Entries by name, those after `after`, at most `limit`."""
        snapshot = self.snapshot
        start = bisect.bisect_right(snapshot.names, after) if after is not None else 0
        found: list[CatalogEntry] = []
        for name in snapshot.names[start:]:
            if len(found) >= limit:
                break
            if tenant is None or snapshot.entries[name].tenant == tenant:
                found.append(snapshot.entries[name])
        return tuple(found)

    def check_new(self, name: str, tenant: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Refuse early what `add` would refuse. Raises InvalidRequestError, ConflictError."""
        check_adapter_id(name)
        entry = self.snapshot.entries.get(name)
        if entry is not None and tenant is not None and entry.tenant != tenant:
            raise ConflictError(f"The adapter `{name}` belongs to another tenant.")
        check_tenant(tenant)
        check_metadata(metadata)

    def note_stray(self, digest: str) -> None:
        """Note that the store is about to get `digest`, so that a crash before `add` leaves no bytes behind."""
        self._db.note_stray(digest)

    def strays(self) -> frozenset[str]:
        """Digests that the store may hold though nothing names them."""
        return self._db.strays() - self.snapshot.digests

    def forget_stray(self, digest: str) -> None:
        """The store no longer has `digest`."""
        self._db.forget_stray(digest)

    def add(
        self,
        name: str,
        version: VersionEntry,
        tenant: str | None = None,
        pinned: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[CatalogEntry, bool]:
        """Make `version` what `name` means; durable on return. (entry, whether this version is new.)

        The number is chosen here. The same content keeps its old number. `pinned=False` and `metadata=None`
        leave an old entry's values.
        """
        self.check_new(name, tenant, metadata)
        old = self.snapshot.entries.get(name)
        known = next((v for v in old.versions if v.digest == version.digest), None) if old else None
        added = known or replace(version, version=self._db.next_version(name))
        entry = _merged(old, added, known is None, name, tenant_of(name, tenant), pinned, metadata)
        self._db.save(adapter_row(entry), None if known else (name, *version_row(added)))
        self.snapshot = make_snapshot({**self.snapshot.entries, name: entry})
        return entry, known is None

    def set_pinned(self, name: str, pinned: bool) -> CatalogEntry:
        """Raises AdapterNotFoundError."""
        entry = replace(self.entry(name), pinned=pinned)
        self._db.save(adapter_row(entry), None)
        self.snapshot = make_snapshot({**self.snapshot.entries, name: entry})
        return entry

    def remove(self, name: str, version: int | None = None) -> tuple[str, ...]:
        """Remove one version, or all; return the digests that nothing names any more, now strays.

        The newest version left becomes the default. Raises AdapterNotFoundError.
        """
        entry = self.entry(name)
        gone = [v for v in entry.versions if version in (None, v.version)]
        if not gone:
            raise AdapterNotFoundError(f"{name}@{version}")
        entries = {other: kept for other, kept in self.snapshot.entries.items() if other != name}
        left = _without(entry, gone)
        if left is not None:
            entries[name] = left
        snapshot = make_snapshot(entries)
        strays = tuple(v.digest for v in gone if v.digest not in snapshot.digests)
        self._db.remove(name, adapter_row(left) if left else None, [v.version for v in gone], strays)
        self.snapshot = snapshot
        return strays

    def close(self) -> None:
        """Let another server have the store."""
        self._db.close()


def _select(entry: CatalogEntry, selector: str) -> VersionEntry | None:
    if _NUMBER.match(selector):
        return next((version for version in entry.versions if version.version == int(selector)), None)
    return next((version for version in entry.versions if version.digest == selector), None)


def _without(entry: CatalogEntry, gone: Sequence[VersionEntry]) -> CatalogEntry | None:
    left = tuple(version for version in entry.versions if version not in gone)
    if not left:
        return None
    keeps_default = any(version.version == entry.default_version for version in left)
    return replace(entry, versions=left, default_version=entry.default_version if keeps_default else left[-1].version)


def _merged(
    old: CatalogEntry | None,
    version: VersionEntry,
    is_new: bool,
    name: str,
    tenant: str,
    pinned: bool,
    metadata: Mapping[str, Any] | None,
) -> CatalogEntry:
    if old is None:
        return CatalogEntry(name, tenant, pinned, version.created, metadata or {}, version.version, (version,))
    return replace(
        old,
        pinned=old.pinned or pinned,
        metadata=old.metadata if metadata is None else metadata,
        default_version=version.version,
        versions=(*old.versions, version) if is_new else old.versions,
    )
