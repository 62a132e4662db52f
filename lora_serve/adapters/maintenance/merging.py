"""Decides how an id of another registry is merged into this one.

An id is taken as a whole, with its versions, numbers, route, history, pin, metadata and aliases, or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.adapters.catalog.state import ALIAS, saved


class MergeOutcome(enum.StrEnum):
    """The outcome of a transfer for one id."""

    MADE = "made"  # the target did not have it
    OVERWRITTEN = "overwritten"  # the target had it; now it is as in the source
    UNCHANGED = "unchanged"  # the target had it with the same versions
    CONFLICT = "conflict"  # the target has a different one; nothing was written
    REFUSED = "refused"  # the source's record or blobs are broken; nothing was written


@dataclass(frozen=True, slots=True)
class Merge:
    """`reason` of a conflict. `strays`: digests that no version names once `changes` are made."""

    outcome: MergeOutcome
    reason: str = ""
    changes: Changes = field(default_factory=dict)
    strays: frozenset[str] = frozenset()

    @property
    def is_written(self) -> bool:
        return self.outcome in (MergeOutcome.MADE, MergeOutcome.OVERWRITTEN)


def merge(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str], overwrite: bool) -> Merge:
    """Merge `entry` and its aliases (name -> target) into the registry of `snapshot`.

    Without `overwrite` an id of the same versions is unchanged, whatever its route, pin, metadata and aliases are.
    """
    old = snapshot.entries.get(entry.name)
    if old is not None and _is_there(snapshot, old, entry, aliases, overwrite):
        return Merge(MergeOutcome.UNCHANGED)
    reason = _blocked(snapshot, entry, aliases) or ("" if overwrite else _contradiction(snapshot, entry, aliases))
    if reason:
        return Merge(MergeOutcome.CONFLICT, reason)
    outcome = MergeOutcome.MADE if old is None else MergeOutcome.OVERWRITTEN
    return Merge(outcome, "", _changes(snapshot, entry, aliases), _strays(snapshot, entry))


def _is_there(
    snapshot: Snapshot, old: CatalogEntry, entry: CatalogEntry, aliases: Mapping[str, str], overwrite: bool
) -> bool:
    if overwrite:
        return old == entry and snapshot.aliases_of(entry.name) == aliases
    return old.tenant == entry.tenant and _contents(old) == _contents(entry)


def _blocked(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> str:
    """The reason why not even overwriting is possible: it would remove another id, or what nobody can read."""
    if held := sorted(snapshot.held & {entry.name, *aliases}):
        return f"the record of `{held[0]}` there cannot be read"
    taken = sorted(alias for alias in aliases if alias in snapshot.entries)
    return f"its alias `{taken[0]}` is an adapter's id there" if taken else ""


def _contradiction(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> str:
    old = snapshot.entries.get(entry.name)
    if old is not None and old.tenant != entry.tenant:
        return f"it belongs to the tenant `{old.tenant}` there, to `{entry.tenant}` in the source"
    if old is not None:
        return f"it has {_numbers(old, entry)} there, {_numbers(entry, old)} in the source"
    if entry.name in snapshot.aliases:
        return f"the name is an alias of `{snapshot.aliases[entry.name]}` there"
    moved = sorted(alias for alias, target in aliases.items() if snapshot.aliases.get(alias, target) != target)
    return f"its alias `{moved[0]}` leads to `{snapshot.aliases[moved[0]]}` there" if moved else ""


def _changes(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> Changes:
    gone = snapshot.aliases_of(entry.name).keys() - aliases.keys() | snapshot.aliases.keys() & {entry.name}
    changes: Changes = {ALIAS + alias: None for alias in sorted(gone)}
    return changes | {ALIAS + alias: target for alias, target in aliases.items()} | saved(entry)


def _strays(snapshot: Snapshot, entry: CatalogEntry) -> frozenset[str]:
    old = snapshot.entries.get(entry.name)
    if old is None:
        return frozenset()
    others = (entry, *(other for other in snapshot.entries.values() if other is not old))
    return frozenset(_contents(old).values()) - {digest for other in others for digest in _contents(other).values()}


def _contents(entry: CatalogEntry) -> dict[int, str]:
    return {version.version: version.digest for version in entry.versions}


def _numbers(entry: CatalogEntry, other: CatalogEntry) -> str:
    """The versions of `entry` that `other` lacks, for messages."""
    found = sorted(_contents(entry).items() - _contents(other).items())
    names = ", ".join(f"{number} ({digest[:19]})" for number, digest in found[:4])
    if not found:
        return "no version of its own"
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"version{'s' if len(found) > 1 else ''} {names}{more}"
