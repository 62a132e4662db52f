"""The catalog of adapters: records in a journal, an immutable snapshot of them, and the version that a name means."""

from __future__ import annotations

import enum
import hashlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from lora_serve.adapters.catalog import edits
from lora_serve.adapters.catalog.blob_leases import BlobLeases
from lora_serve.adapters.catalog.blob_records import BlobRecordWriter
from lora_serve.adapters.catalog.edits import TenantRemoval, without_tenant
from lora_serve.adapters.catalog.entry import Canary, CatalogEntry, Route, VersionEntry
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import (
    ADAPTER,
    ALIAS,
    CatalogLedger,
    CatalogState,
    Snapshot,
    check_pinned,
    saved,
)
from lora_serve.adapters.stores.base import RecordStore
from lora_serve.adapters.stores.files import StoreLock
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import AdapterRef, check_adapter_id, split_name
from lora_serve.core.errors import AdapterNotFoundError, AdapterUnavailableError, ConflictError

_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")
# What is looked at where there is no entry, so that an entry that is hidden takes no longer than none.
_NOBODYS = CatalogEntry("", "", False, 0.0, {}, 0, Route(0), ())
_OUTAGE_GRACE = 2.0  # seconds without the journal, after which an unknown id may be one that others registered


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


class Catalog:
    """Every method may be called from any thread. `resolve`, `entry` and `snapshot` never wait."""

    def __init__(self, journal: Journal, replica: str, lock: StoreLock | None = None, is_shared: bool = False) -> None:
        """`replica`: a name of this server that outlives it. `lock`: on the store folder, released by `close`.

        Raises AdapterUnavailableError.
        """
        self._store_lock = lock
        self.replica = replica
        self.is_shared = is_shared
        self.ledger = CatalogLedger(journal, CatalogState(), "adapter registry")
        self.leases = BlobLeases(replica, self.ledger)

    # -- readers -----------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The newest known snapshot."""
        return self.ledger.state.snapshot

    @property
    def is_away(self) -> bool:
        """True if the shared journal cannot be reached, so that others' changes are unknown."""
        return self.ledger.is_away

    @property
    def drained(self) -> frozenset[str]:
        """Digests that were removed here and no version names: to be freed once no row here uses them."""
        state, drain_holder = self.ledger.state, self.leases.drain_holder
        held = {
            digest for digest, lease in state.leases.items() if drain_holder in lease.holders and not lease.condemned
        }
        return frozenset(held - state.snapshot.digests)

    def resolve(self, name: str, tenant: str | None = None, sticky_key: str | None = None) -> Resolution:
        """The version that `id`, `id@3`, `id@sha256:<hex>` or an alias means, and why.

        `tenant`: other tenants' adapters do not exist for it. `sticky_key`: chooses between default and canary. Raises
        AdapterNotFoundError with the name as given; AdapterUnavailableError for a held name, and for an unknown one
        while the shared registry is away.
        """
        found = find(self.snapshot, name, tenant, sticky_key)
        if found is not None:
            return found
        if self.ledger.seconds_away > _OUTAGE_GRACE:
            raise AdapterUnavailableError(
                f"The shared adapter registry cannot be reached, and `{name}` is not known here; try again.",
                retry_after=5,
            )
        raise AdapterNotFoundError(name)

    def entry(self, name: str) -> CatalogEntry:
        """Raises AdapterNotFoundError."""
        return _entry_in(self.ledger.state, name)

    # -- adapters ----------------------------------------------------------------------------------------------

    def edit(self, name: str, change: Callable[[CatalogEntry], CatalogEntry]) -> CatalogEntry:
        """Replace an entry by `change(entry)`, durably. Raises AdapterNotFoundError, and what `change` raises."""

        def edit(state: CatalogState) -> tuple[Changes, CatalogEntry]:
            old = _entry_in(state, name)
            new = change(old)
            return ({} if new == old else saved(new)), new

        return self.ledger.change(edit)

    def set_pinned(self, name: str, pinned: bool, max_bytes: int | None = None) -> CatalogEntry:
        """Pin or unpin. `max_bytes`: the most that the tenant may pin; holds even if several are pinned at once.

        Raises AdapterNotFoundError, ForbiddenError.
        """

        def edit(state: CatalogState) -> tuple[Changes, CatalogEntry]:
            old = _entry_in(state, name)
            new = replace(old, pinned=pinned)
            if pinned and max_bytes is not None:
                check_pinned(state.snapshot, new, max_bytes)
            return ({} if new == old else saved(new)), new

        return self.ledger.change(edit)

    def set_route(self, name: str, version: int | None, canary: Canary | None) -> CatalogEntry:
        """Set the default version (None: it stays) and the canary. Raises AdapterNotFoundError, InvalidRequestError."""
        return self.edit(name, lambda entry: edits.routed(entry, version, canary))

    def set_sharing(self, name: str, shared_with: Collection[str]) -> CatalogEntry:
        """Set the other tenants that may use the adapter. Raises AdapterNotFoundError, InvalidRequestError."""
        return self.edit(name, lambda entry: edits.shared(entry, shared_with))

    def set_metadata(self, name: str, metadata: Mapping[str, Any]) -> CatalogEntry:
        """Set the adapter's metadata, all of it. Raises AdapterNotFoundError, InvalidRequestError."""
        return self.edit(name, lambda entry: edits.described(entry, metadata))

    def roll_back(self, name: str) -> CatalogEntry:
        """End the canary or, without one, return to the version before. Raises AdapterNotFoundError, ConflictError."""
        return self.edit(name, edits.rolled_back)

    def remove(self, name: str, version: int | None = None, held_digests: Collection[str] = ()) -> tuple[str, ...]:
        """Remove one version, or all, durably. Returns the digests that no version names any more, leased by `drain`.

        Aliases that would lead nowhere are removed too. `held_digests`: the blobs of a name that is held. Raises
        AdapterNotFoundError, ConflictError.
        """

        def edit(state: CatalogState) -> tuple[Changes, tuple[str, ...]]:
            if version is None and name in state.snapshot.held:
                entry, left, digests = None, None, tuple(held_digests)
                changes: Changes = {ADAPTER + name: None, ALIAS + name: None}
            else:
                entry = _entry_in(state, name)
                gone = [v for v in entry.versions if version in (None, v.version)]
                if not gone:
                    raise AdapterNotFoundError(f"{name}@{version}")
                edits.check_removal(entry, gone)
                left, digests = edits.without(entry, gone), tuple(v.digest for v in gone)
                changes = {ADAPTER + name: None} if left is None else saved(left)
            others = [e for e in (*state.snapshot.entries.values(), left) if e is not None and e is not entry]
            named = {v.digest for other in others for v in other.versions}
            strays = tuple(digest for digest in digests if digest not in named)
            for digest in strays:
                changes |= state.leased_by(self.leases.drain_holder, digest, time.time())
            return changes | _dangling(state.snapshot, name, left), strays

        return self.ledger.change(edit)

    def remove_tenant(self, tenant: str) -> TenantRemoval:
        """Remove all that a tenant has, in one durable commit."""
        return self.ledger.change(lambda state: without_tenant(state, tenant, self.leases.drain_holder, time.time()))

    # -- aliases -----------------------------------------------------------------------------------------------

    def set_alias(self, alias: str, target: str) -> None:
        """Let `alias` mean `target` (`id` or `id@selector`) from now on.

        Raises InvalidRequestError, AdapterNotFoundError, ConflictError if `alias` is an adapter's id.
        """
        check_adapter_id(alias)

        def edit(state: CatalogState) -> tuple[Changes, None]:
            state.snapshot.check_held(alias)
            if alias in state.snapshot.entries:
                raise ConflictError(f"`{alias}` is an adapter's id.")
            state.snapshot.check_held(split_name(target)[0])
            if split_name(target)[0] not in state.snapshot.entries:  # an alias of an alias
                raise AdapterNotFoundError(target)
            if find(state.snapshot, target, None, None) is None:
                raise AdapterNotFoundError(target)
            return {ALIAS + alias: target}, None

        self.ledger.change(edit)

    def remove_alias(self, alias: str) -> None:
        """Raises AdapterNotFoundError."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            if alias not in state.snapshot.aliases and alias not in state.snapshot.held:
                raise AdapterNotFoundError(alias)
            return {ALIAS + alias: None}, None

        self.ledger.change(edit)

    # -- the journal --------------------------------------------------------------------------------------------

    def record_lineage(self) -> None:
        """Write the lineage of a registry of an older version; an empty registry is not begun by this."""
        self.ledger.change(lambda state: (state.with_lineage({}) if state.position.epoch else {}, None))

    def refresh(self) -> None:
        """Bring in what others wrote. Raises AdapterUnavailableError."""
        self.ledger.refresh()

    # -- records beside the blobs ------------------------------------------------------------------------------

    def keep_blob_records(self, store: RecordStore) -> BlobRecordWriter:
        """Keep, beside each blob of `store`, a record of each id that names it."""
        self.ledger.observer = writer = BlobRecordWriter(store, store.near if isinstance(store, TieredStore) else None)
        return writer

    def close(self) -> None:
        """Close the journal and release the store's lock."""
        self.ledger.close()
        if self._store_lock is not None:
            self._store_lock.close()


def _entry_in(state: CatalogState, name: str) -> CatalogEntry:
    state.snapshot.check_held(name)
    entry = state.snapshot.entries.get(name)
    if entry is None:
        raise AdapterNotFoundError(name)
    return entry


def _dangling(snapshot: Snapshot, name: str, left: CatalogEntry | None) -> Changes:
    """The changes that remove the aliases of `name` that lead to nothing once only `left` is left."""
    changes: Changes = {}
    for alias, target in snapshot.aliases_of(name).items():
        _, selector = split_name(target)
        if left is None or (selector is not None and select(left, selector) is None):
            changes[ALIAS + alias] = None
    return changes
