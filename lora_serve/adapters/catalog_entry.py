"""One adapter id as the catalog knows it, and how it is written into rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_serve.core.adapter import AdapterRef, AdapterTraits, AddedToken
from lora_serve.core.errors import InvalidRequestError

MAX_METADATA_BYTES = 65536
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """One version of one adapter."""

    version: int
    digest: str
    rank: int
    num_bytes: int
    summary: Mapping[str, Any]  # of its config, for the card
    source: str  # where it came from, in words
    created: float  # Unix seconds

    @property
    def traits(self) -> AdapterTraits:
        """As the registration noted them."""
        noted = self.summary.get("traits", {})
        return AdapterTraits(
            noted.get("is_additive", True),
            tuple(noted.get("invocation_tokens", ())),
            noted.get("base", ""),
            noted.get("vocab_size", 0),
            tuple(AddedToken(**token) for token in noted.get("added_tokens", ())),
        )


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One adapter id with its versions, oldest first; at least one."""

    name: str
    tenant: str
    pinned: bool
    created: float
    metadata: Mapping[str, Any]
    default_version: int
    versions: tuple[VersionEntry, ...]

    @property
    def default(self) -> VersionEntry:
        """What the bare id means."""
        return next(version for version in self.versions if version.version == self.default_version)

    def ref(self, version: VersionEntry | None = None) -> AdapterRef:
        """The reference that travels with requests."""
        found = version or self.default
        return AdapterRef(
            self.tenant, self.name, found.version, found.digest, found.rank, found.num_bytes, found.traits
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The catalog at one moment."""

    entries: Mapping[str, CatalogEntry]
    names: tuple[str, ...]  # sorted
    digests: frozenset[str]  # named by any version


def tenant_of(name: str, tenant: str | None = None) -> str:
    """Who owns an adapter: as given, else the part before the first "/", else "default"."""
    return tenant or (name.partition("/")[0] if "/" in name else "default")


def make_snapshot(entries: Mapping[str, CatalogEntry]) -> Snapshot:
    """The snapshot of these entries."""
    digests = frozenset(version.digest for entry in entries.values() for version in entry.versions)
    return Snapshot(entries, tuple(sorted(entries)), digests)


def check_tenant(tenant: str | None) -> None:
    """Raises InvalidRequestError."""
    if tenant is not None and not _TENANT.match(tenant):
        raise InvalidRequestError(f"A tenant's name must match {_TENANT.pattern[:-2]}.", param="tenant")


def check_metadata(metadata: Mapping[str, Any] | None) -> str:
    """The metadata as JSON text. Raises InvalidRequestError."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError("metadata must be a JSON object.", param="metadata") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidRequestError(f"metadata must not exceed {MAX_METADATA_BYTES} bytes.", param="metadata")
    return text


def adapter_row(entry: CatalogEntry) -> tuple[Any, ...]:
    """As CatalogDb.save takes it."""
    metadata = check_metadata(entry.metadata)
    return entry.name, entry.tenant, int(entry.pinned), entry.created, metadata, entry.default_version


def version_row(entry: VersionEntry) -> tuple[Any, ...]:
    """As CatalogDb.save takes it, without the adapter's name."""
    summary = json.dumps(dict(entry.summary))
    return entry.version, entry.digest, entry.rank, entry.num_bytes, summary, entry.source, entry.created


def entry_of(rows: tuple[tuple[Any, ...], list[tuple[Any, ...]]]) -> CatalogEntry:
    """The entry of an adapter's row and its versions' rows."""
    (name, tenant, pinned, created, metadata, default), versions = rows
    table = tuple(_version_of(*row) for row in versions)
    return CatalogEntry(name, tenant, bool(pinned), created, json.loads(metadata), default, table)


def _version_of(
    version: int, digest: str, rank: int, num_bytes: int, summary: str, source: str, created: float
) -> VersionEntry:
    return VersionEntry(version, digest, rank, num_bytes, json.loads(summary), source, created)
