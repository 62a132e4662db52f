"""A tenant leaves: its adapters, the aliases that lead to them, and its share in others'."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, CatalogState, lease_change, saved


@dataclass(frozen=True, slots=True)
class TenantRemoval:
    """`strays`: digests that nothing names any more."""

    names: tuple[str, ...]
    strays: tuple[str, ...]


def without_tenant(state: CatalogState, tenant: str, drain_holder: str, now: float) -> tuple[Changes, TenantRemoval]:
    """As one commit; the strays' blobs are held by `drain_holder` from then on. `now`: Unix seconds."""
    entries = state.snapshot.entries.values()
    gone = sorted((entry for entry in entries if entry.tenant == tenant), key=lambda entry: entry.name)
    left = [entry for entry in entries if entry.tenant != tenant]
    changes: Changes = {}
    for entry in gone:
        changes[ADAPTER + entry.name] = None
        changes |= {ALIAS + alias: None for alias in state.snapshot.aliases_of(entry.name)}
    for entry in left:
        if tenant in entry.shared_with:
            changes |= saved(replace(entry, shared_with=tuple(name for name in entry.shared_with if name != tenant)))
    strays = tuple(sorted(_digests(gone) - _digests(left)))
    for digest in strays:
        changes |= lease_change(digest, state.leases_on(digest).with_holder(drain_holder, now))
    return changes, TenantRemoval(tuple(entry.name for entry in gone), strays)


def _digests(entries: list[CatalogEntry]) -> set[str]:
    return {version.digest for entry in entries for version in entry.versions}
