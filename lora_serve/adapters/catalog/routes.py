"""From a name in a request to one version of one adapter."""

from __future__ import annotations

import hashlib
import re

from lora_serve.adapters.catalog.entry import CatalogEntry, VersionEntry
from lora_serve.adapters.catalog.resolution import Resolution, Selection
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.adapter import split_name

_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")


def find(snapshot: Snapshot, name: str, tenant: str | None, sticky_key: str | None) -> Resolution | None:
    """`id`, `id@3`, `id@sha256:<hex>`, or an alias in place of the id; None: there is none that `tenant` may see.

    For a tenant, `support` is `<tenant>/support` first, if there is one. `sticky_key`: who asks, for the canary;
    None: the default version.
    """
    if tenant is not None and (own := own_name(tenant, name)) != name:
        found = _find(snapshot, own, tenant, sticky_key)
        if found is not None:
            return found
    return _find(snapshot, name, tenant, sticky_key)


def own_name(tenant: str, name: str) -> str:
    """The name in the tenant's own namespace."""
    return name if name.startswith(f"{tenant}/") else f"{tenant}/{name}"


def _find(snapshot: Snapshot, name: str, tenant: str | None, sticky_key: str | None) -> Resolution | None:
    adapter_id, selector = split_name(name)
    target, aliased = snapshot.aliases.get(adapter_id), None
    if target is not None:
        adapter_id, aliased = split_name(target)
    if selector is not None and aliased is not None:  # two selectors: at most one can be meant
        return None
    entry = snapshot.entries.get(adapter_id)
    if entry is None or not entry.is_visible_to(tenant):
        return None
    if selector is not None:
        return _selected(entry, selector, Selection.PINNED)
    if aliased is not None:
        return _selected(entry, aliased, Selection.ALIAS)
    return split(entry, sticky_key)


def _selected(entry: CatalogEntry, selector: str, selection: Selection) -> Resolution | None:
    version = select(entry, selector)
    return None if version is None else Resolution(entry, version, selection)


def select(entry: CatalogEntry, selector: str) -> VersionEntry | None:
    """A version by number or digest."""
    if _NUMBER.match(selector):
        return next((version for version in entry.versions if version.version == int(selector)), None)
    return next((version for version in entry.versions if version.digest == selector), None)


def split(entry: CatalogEntry, sticky_key: str | None) -> Resolution:
    """The default version, or the canary for its part of the keys: the same key always gets the same answer."""
    canary = entry.route.canary
    if canary is None or sticky_key is None or share_of(entry.name, canary.version, sticky_key) >= canary.percent:
        return Resolution(entry, entry.default, Selection.DEFAULT)
    return Resolution(entry, entry.version(canary.version), Selection.CANARY)


def share_of(name: str, canary_version: int, sticky_key: str) -> float:
    """Where a key lies between 0 and 100. It does not depend on the percentage, so that a canary that grows keeps its
    users; it does on the version, so that not always the same users try what is new.
    """
    text = f"{name}\0{canary_version}\0{sticky_key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) * (100 / 2**64)
