"""Merges the two branches of a shared journal that was started from an older state and went on: whatever was registered
on either branch is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, BLOB, LINEAGE, BlobLease, lease_of, lineage_of

Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with the records that may have changed on both branches, as (ours, theirs), merged in.

    An adapter gets the versions of both; its route and everything else are theirs, the live branch's. An alias gives
    way to an adapter of its name. A named blob is not condemned. If ours was rebuilt since the fork, only ours counts.
    """
    merged = dict(records)
    is_rebuilt = _is_rebuilt(*contested.get(LINEAGE, (None, None)))
    for name, (ours, theirs) in contested.items():
        if is_rebuilt:
            text = ours
        elif name.startswith(ADAPTER):
            text = _joined(ours, theirs)
        else:
            text = theirs if name.startswith(BLOB) else theirs or ours
        if text is None:
            merged.pop(name, None)
        else:
            merged[name] = text
    entries = [e for n, text in merged.items() if n.startswith(ADAPTER) and (e := entry_of(text)) is not None]
    for entry in entries:
        merged.pop(ALIAS + entry.name, None)
        for version in entry.versions:
            _keep(merged, BLOB + version.digest)
    return merged


def _is_rebuilt(ours: str | None, theirs: str | None) -> bool:
    """True if our lineage has a rebuild that theirs lacks."""
    our, their = lineage_of(ours), lineage_of(theirs)
    known = their.gaps if their else ()
    return our is not None and len(our.gaps) > len(known) and our.gaps[: len(known)] == known


def _joined(ours: str | None, theirs: str | None) -> str | None:
    if ours is None or theirs is None:
        return theirs or ours
    our, their = entry_of(ours), entry_of(theirs)
    if our is None or their is None or our.tenant != their.tenant:
        return theirs if their is not None else ours
    return document_of(_united(our, their))


def _united(our: CatalogEntry, their: CatalogEntry) -> CatalogEntry:
    """Their entry with the versions that only ours has, which get a new number where theirs uses the same."""
    last, versions = max(our.last_version, their.last_version), list(their.versions)
    known = {version.digest for version in versions}
    for version in our.versions:
        if version.digest in known:
            continue
        if their.has_version(version.version):
            last += 1
            version = replace(version, version=last)  # noqa: PLW2901
        versions.append(version)
    return replace(their, last_version=last, versions=tuple(sorted(versions, key=lambda v: v.version)))


def _keep(records: Records, name: str) -> None:
    note = lease_of(records.get(name))
    if note.condemned:
        records[name] = BlobLease(note.holders).text
