"""Resolves a name in a request to one version of one adapter, and tells how the name came to mean it."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry, Route, VersionEntry
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import AdapterRef, split_name

_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")
# What is looked at where there is no entry, so that an entry that is hidden takes no longer than none.
_NOBODYS = CatalogEntry("", "", False, 0.0, {}, 0, Route(0), ())


class Selection(enum.StrEnum):
    """The reason why a name means one version."""

    DEFAULT = "default"  # the id's route
    CANARY = "canary"  # the canary of the id's route
    PINNED = "pinned"  # the caller named the version, by number or digest
    ALIAS = "alias"  # the caller named an alias, and the alias names the version


@dataclass(frozen=True, slots=True)
class Resolution:
    """A version, chosen from its entry as it was when the name was looked up."""

    entry: CatalogEntry
    version: VersionEntry
    selection: Selection

    @property
    def ref(self) -> AdapterRef:
        """The reference that travels with requests."""
        return self.entry.ref(self.version)

    @property
    def names_version(self) -> bool:
        """True if the name means this version whatever the id's route says."""
        return self.selection in (Selection.PINNED, Selection.ALIAS)

    @property
    def previous(self) -> AdapterRef | None:
        """The version that the same name meant before: the default version before its canary, the last one in the
        route's history before the default version. None: there is none, as for every name that names a version.
        """
        if self.names_version:
            return None
        before = self.entry.default if self.selection is Selection.CANARY else self.entry.previous
        return None if before is None or before.digest == self.version.digest else self.entry.ref(before)


def find(snapshot: Snapshot, name: str, tenant: str | None, sticky_key: str | None) -> Resolution | None:
    """Resolve `id`, `id@3`, `id@sha256:<hex>`, or an alias in place of the id; None: nothing that `tenant` may see.

    For a tenant, `support` is `<tenant>/support` first, if there is one. `sticky_key`: chooses between default and
    canary; None: the default version. Raises UnreadableRecordError for a name that is held.
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
    snapshot.check_held(adapter_id, tenant)
    adapter_id, aliased = split_name(snapshot.aliases.get(adapter_id, adapter_id))
    if selector is not None and aliased is not None:  # two selectors: at most one can be meant
        return None
    snapshot.check_held(adapter_id, tenant)
    entry = snapshot.entries.get(adapter_id, _NOBODYS)
    if not entry.is_visible_to(tenant) or entry is _NOBODYS:
        return None
    chosen = aliased if selector is None else selector
    if chosen is None:
        return split(entry, sticky_key)
    version = select(entry, chosen)
    selection = Selection.PINNED if selector is not None else Selection.ALIAS
    return None if version is None else Resolution(entry, version, selection)


def select(entry: CatalogEntry, selector: str) -> VersionEntry | None:
    """A version by number or digest."""
    if _NUMBER.match(selector):
        return next((version for version in entry.versions if version.version == int(selector)), None)
    return next((version for version in entry.versions if version.digest == selector), None)


def split(entry: CatalogEntry, sticky_key: str | None) -> Resolution:
    """The default version, or the canary for its percentage of the keys: the same key always gets the same answer."""
    canary = entry.route.canary
    if canary is None or sticky_key is None or share_of(entry.name, canary.version, sticky_key) >= canary.percent:
        return Resolution(entry, entry.default, Selection.DEFAULT)
    return Resolution(entry, entry.version(canary.version), Selection.CANARY)


def share_of(name: str, canary_version: int, sticky_key: str) -> float:
    """A hash of the key between 0 and 100. The percentage has no part in it, so that a growing canary keeps its users;
    the version has, so that not always the same users try what is new.
    """
    text = f"{name}\0{canary_version}\0{sticky_key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) * (100 / 2**64)
