"""What holds of the catalog after a shared journal was started from an older state and went on: whatever was registered
on either branch is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lora_serve.adapters.catalog.blob_notes import lease_record_of
from lora_serve.adapters.catalog.documents import document_of, entry_of
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, BLOB, LINEAGE, lineage_of

Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with what may have changed on both branches: (ours, theirs).

    An adapter has the versions of both, and its route is that of the branch that lives, as is all else. An alias gives
    way to an adapter of its name. What is named now is not being deleted. A registry that was made again since then,
    from all that was left of it, has ours as its only word.
    """
    merged = dict(records)
    is_made_again = _is_made_again(*contested.get(LINEAGE, (None, None)))
    for name, (ours, theirs) in contested.items():
        if is_made_again:
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


def _is_made_again(ours: str | None, theirs: str | None) -> bool:
    """Whether our mark tells of a rebuild that theirs does not know."""
    our, their = lineage_of(ours), lineage_of(theirs)
    known = their.gaps if their else ()
    return our is not None and len(our.gaps) > len(known) and our.gaps[: len(known)] == known


def _joined(ours: str | None, theirs: str | None) -> str | None:
    if ours is None or theirs is None:
        return theirs or ours
    our, their = entry_of(ours), entry_of(theirs)
    if our is None or their is None or our.tenant != their.tenant:
        return theirs if their is not None else ours
    return document_of(_with_versions_of(our, their))


def _with_versions_of(our: CatalogEntry, their: CatalogEntry) -> CatalogEntry:
    """Theirs, with what only ours has; a number that both have given is theirs, and ours gets a new one."""
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
    note = lease_record_of(records.get(name))
    if note.condemned:
        records[name] = replace(note, condemned=False).text
