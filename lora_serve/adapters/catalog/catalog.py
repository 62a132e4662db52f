"""Which adapters there are: records in a journal, and an immutable snapshot of them for readers.

Readers, on any thread, take `snapshot`, which is replaced as a whole (ledger.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lora_serve.adapters.catalog import edits, routes
from lora_serve.adapters.catalog.allowance import check_allowance, check_pinned, owner_of
from lora_serve.adapters.catalog.blob_leases import BlobLeases
from lora_serve.adapters.catalog.blob_writer import BlobRecordWriter
from lora_serve.adapters.catalog.entry import (
    Canary,
    CatalogEntry,
    VersionEntry,
    check_metadata,
    check_tenant,
    tenant_of,
)
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.ledger import Changes, Ledger
from lora_serve.adapters.catalog.resolution import Resolution
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, CatalogState, lease_change, saved
from lora_serve.adapters.catalog.tenant_removal import TenantRemoval, without_tenant
from lora_serve.adapters.stores.base import RecordStore
from lora_serve.adapters.stores.lock import StoreLock
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import check_adapter_id, split_name
from lora_serve.core.errors import AdapterNotFoundError, AdapterUnavailableError, ConflictError
from lora_serve.core.tenant import NO_LIMITS, Quota

T = TypeVar("T")
_OUTAGE_GRACE = 2.0  # seconds without the journal, after which an unknown id may be one that we have not heard of


class Catalog:
    """Readers: `resolve`, `entry`, `entries`, `snapshot`. Everything else is for the registry and the follower."""

    def __init__(self, journal: Journal, replica: str, lock: StoreLock | None = None, is_shared: bool = False) -> None:
        """`replica`: a name of this server that outlives it. `lock`: of the store folder, given back by `close`.

        Raises AdapterUnavailableError.
        """
        self._store_lock = lock
        self.replica = replica
        self.is_shared = is_shared
        self.ledger = Ledger(journal, CatalogState(), "adapter registry")
        self.leases = BlobLeases(replica, self._change, self.refresh)

    # -- readers -----------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """What is known now."""
        return self.ledger.state.snapshot

    @property
    def is_away(self) -> bool:
        """Whether the shared journal cannot be reached, so that others' changes are not known."""
        return self.ledger.is_away

    @property
    def drained(self) -> frozenset[str]:
        """What was removed here, and nothing names since: to be freed once no row here uses it."""
        state, drain_holder = self.ledger.state, self.leases.drain_holder
        held = {digest for digest, note in state.leases.items() if drain_holder in note.holders and not note.condemned}
        return frozenset(held - state.snapshot.digests)

    def resolve(self, name: str, tenant: str | None = None, sticky_key: str | None = None) -> Resolution:
        """The version that `id`, `id@3`, `id@sha256:<hex>` or an alias means, and how it came to mean it.

        `tenant`: others' adapters do not exist for it. `sticky_key`: who asks, for the canary. Raises
        AdapterNotFoundError with the name as given; AdapterUnavailableError for an unknown name while the shared
        registry is away.
        """
        found = routes.find(self.snapshot, name, tenant, sticky_key)
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

    def entries(
        self, tenant: str | None = None, after: str | None = None, limit: int = 100, seen_by: str | None = None
    ) -> tuple[CatalogEntry, ...]:
        """A tenant's entries by name, those after `after`, at most `limit`, that `seen_by` may see; None: any, all."""
        return self.snapshot.page(tenant, after, limit, seen_by)

    # -- adapters ----------------------------------------------------------------------------------------------

    def check_new(self, name: str, tenant: str | None, metadata: Mapping[str, Any] | None) -> None:
        """Refuse early what `add` would refuse. Raises InvalidRequestError, ConflictError."""
        _check_new(self.ledger.state, name, tenant, metadata)

    def add(
        self,
        name: str,
        version: VersionEntry,
        tenant: str | None = None,
        pinned: bool = False,
        metadata: Mapping[str, Any] | None = None,
        activate: bool = True,
        holder: str = "",
        quota: Quota = NO_LIMITS,
        only: str | None = None,
    ) -> tuple[CatalogEntry, VersionEntry, bool]:
        """Note a version, durably; `holder`'s hold of its blob ends. (entry, version, whether it is new.)

        `quota`: of its owner, held even if several register for it at once; raises QuotaExceededError. `only`: files
        of this digest must have been a known id's already (None: any may come); raises OtherContentError.
        The number is chosen here. The same content keeps its old number. `pinned=False` and `metadata=None` leave an
        old entry's values; `activate=False` leaves what the id means.
        """

        def edit(state: CatalogState) -> tuple[Changes, tuple[CatalogEntry, VersionEntry, bool]]:
            _check_new(state, name, tenant, metadata)
            owner = owner_of(state.snapshot, name, tenant)
            check_allowance(state.snapshot, owner, name, version.digest, version.num_bytes, quota)
            old = state.snapshot.entries.get(name)
            edits.check_same_content(old, only)
            if old is None:
                entry = edits.new_entry(name, tenant_of(name, tenant), version, pinned, metadata)
            else:
                entry = edits.with_version(old, version, pinned, metadata, activate)
            added = next(v for v in entry.versions if v.digest == version.digest)
            released = lease_change(version.digest, state.leases_on(version.digest).without(holder)) if holder else {}
            is_new = old is None or not old.has_version(added.version)
            return {**saved(entry), **released}, (entry, added, is_new)

        return self._change(edit)

    def edit(self, name: str, change: Callable[[CatalogEntry], CatalogEntry]) -> CatalogEntry:
        """Replace an entry by what `change` makes of it, durably. Raises AdapterNotFoundError, what `change` raises."""

        def edit(state: CatalogState) -> tuple[Changes, CatalogEntry]:
            old = _entry_in(state, name)
            new = change(old)
            return ({} if new == old else saved(new)), new

        return self._change(edit)

    def set_pinned(self, name: str, pinned: bool, max_bytes: int | None = None) -> CatalogEntry:
        """`max_bytes`: that its tenant may have pinned, held even if several are pinned at once.

        Raises AdapterNotFoundError, ForbiddenError.
        """

        def edit(state: CatalogState) -> tuple[Changes, CatalogEntry]:
            old = _entry_in(state, name)
            new = replace(old, pinned=pinned)
            if pinned and max_bytes is not None:
                check_pinned(state.snapshot, new, max_bytes)
            return ({} if new == old else saved(new)), new

        return self._change(edit)

    def set_route(self, name: str, version: int | None, canary: Canary | None) -> CatalogEntry:
        """Which version the id means, and which one a part of its requests gets. `version` None: as it is."""
        return self.edit(name, lambda entry: edits.routed(entry, version, canary))

    def set_sharing(self, name: str, shared_with: Collection[str]) -> CatalogEntry:
        """Which other tenants may use it. Raises AdapterNotFoundError, InvalidRequestError."""
        return self.edit(name, lambda entry: edits.shared(entry, shared_with))

    def roll_back(self, name: str) -> CatalogEntry:
        """A canary ends; without one, the version before is back. Raises AdapterNotFoundError, ConflictError."""
        return self.edit(name, edits.rolled_back)

    def remove(self, name: str, version: int | None = None) -> tuple[str, ...]:
        """Remove one version, or all, durably; the digests that nothing names any more, each held as by `drain`.

        Aliases that would lead nowhere go too. Raises AdapterNotFoundError.
        """

        def edit(state: CatalogState) -> tuple[Changes, tuple[str, ...]]:
            entry = _entry_in(state, name)
            gone = [v for v in entry.versions if version in (None, v.version)]
            if not gone:
                raise AdapterNotFoundError(f"{name}@{version}")
            left = edits.without(entry, gone)
            changes: Changes = {ADAPTER + name: None} if left is None else saved(left)
            others = [e for e in (*state.snapshot.entries.values(), left) if e is not None and e is not entry]
            named = {v.digest for other in others for v in other.versions}
            strays = tuple(v.digest for v in gone if v.digest not in named)
            for digest in strays:
                changes |= lease_change(
                    digest, state.leases_on(digest).with_holder(self.leases.drain_holder, time.time())
                )
            return changes | _dangling(state.snapshot, name, left), strays

        return self._change(edit)

    def remove_tenant(self, tenant: str) -> TenantRemoval:
        """All that it has, in one durable commit."""
        self.refresh()  # without a commit, nothing would say that this is not the newest state
        return self._change(lambda state: without_tenant(state, tenant, self.leases.drain_holder, time.time()))

    # -- aliases -----------------------------------------------------------------------------------------------

    def set_alias(self, alias: str, target: str) -> None:
        """`alias` means `target` (`id` or `id@selector`) from now on.

        Raises InvalidRequestError, AdapterNotFoundError, ConflictError if `alias` is an adapter's id.
        """
        check_adapter_id(alias)

        def edit(state: CatalogState) -> tuple[Changes, None]:
            if alias in state.snapshot.entries:
                raise ConflictError(f"`{alias}` is an adapter's id.")
            if split_name(target)[0] not in state.snapshot.entries:
                raise AdapterNotFoundError(target)
            if routes.find(state.snapshot, target, None, None) is None:
                raise AdapterNotFoundError(target)
            return {ALIAS + alias: target}, None

        self._change(edit)

    def remove_alias(self, alias: str) -> None:
        """Raises AdapterNotFoundError."""

        def edit(state: CatalogState) -> tuple[Changes, None]:
            if alias not in state.snapshot.aliases:
                raise AdapterNotFoundError(alias)
            return {ALIAS + alias: None}, None

        self._change(edit)

    # -- whole records -----------------------------------------------------------------------------------------

    def change(self, edit: Callable[[CatalogState], tuple[Changes, T]]) -> T:
        """Commit several records at once, as they are: what a transfer from another registry needs.

        `edit` gets the newest state, again whenever another replica was first; no changes, no commit. Raises
        AdapterUnavailableError, and what `edit` raises.
        """
        return self._change(edit)

    def record_lineage(self) -> None:
        """A registry of an older version has no mark yet. One that nothing was written to is not begun by this."""
        self._change(lambda state: (state.with_lineage({}) if state.position.epoch else {}, None))

    # -- what others wrote -------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it, on whichever thread, after each change of the snapshot."""
        self.ledger.listen(listener)

    def wait(self, seconds: float) -> None:
        """Return once others may have written something, or after so many seconds. Raises AdapterUnavailableError."""
        self.ledger.wait(seconds)

    def refresh(self) -> None:
        """Bring in what others wrote. Raises AdapterUnavailableError."""
        self.ledger.refresh()

    # -- what lies beside the blobs ----------------------------------------------------------------------------

    def keep_blob_records(self, store: RecordStore) -> BlobRecordWriter:
        """Keep, beside each blob of `store`, what is said of the ids that name it."""
        self.ledger.observer = writer = BlobRecordWriter(store, store.near if isinstance(store, TieredStore) else None)
        return writer

    def close(self) -> None:
        """Let another server have the store."""
        self.ledger.close()
        if self._store_lock is not None:
            self._store_lock.close()

    def _change(self, edit: Callable[[CatalogState], tuple[Changes, T]]) -> T:
        def edit_and_mark(state: CatalogState) -> tuple[Changes, T]:
            changes, result = edit(state)
            return (state.with_lineage(changes) if changes else {}), result

        return self.ledger.change(edit_and_mark)


def _entry_in(state: CatalogState, name: str) -> CatalogEntry:
    entry = state.snapshot.entries.get(name)
    if entry is None:
        raise AdapterNotFoundError(name)
    return entry


def _check_new(state: CatalogState, name: str, tenant: str | None, metadata: Mapping[str, Any] | None) -> None:
    check_adapter_id(name)
    entry = state.snapshot.entries.get(name)
    if entry is not None and tenant is not None and entry.tenant != tenant:
        raise ConflictError(f"The adapter `{name}` belongs to another tenant.")
    if name in state.snapshot.aliases:
        raise ConflictError(f"`{name}` is an alias of `{state.snapshot.aliases[name]}`.")
    check_tenant(tenant)
    check_metadata(metadata)


def _dangling(snapshot: Snapshot, name: str, left: CatalogEntry | None) -> Changes:
    """Takes away the aliases of `name` that lead to nothing once only `left` is left."""
    changes: Changes = {}
    for alias in snapshot.aliases_of(name):
        _, selector = split_name(snapshot.aliases[alias])
        if left is None or (selector is not None and routes.select(left, selector) is None):
            changes[ALIAS + alias] = None
    return changes
