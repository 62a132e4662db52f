"""A registration as one value, the changes of a catalog entry as functions, and the removal of a tenant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import (
    Canary,
    CatalogEntry,
    Route,
    VersionEntry,
    check_metadata,
    check_sharing,
    check_tenant,
    noted_template,
    tenant_of,
    vouched,
)
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, CatalogLedger, CatalogState, Snapshot, lease_change, saved
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import AdapterUnavailableError, ConflictError, InvalidRequestError, QuotaExceededError
from lora_serve.core.tenant import EVERYBODY, NO_LIMITS, Quota

MAX_HISTORY = 20


class OtherContentError(ConflictError):
    """The id has other content, and no new version was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A caller's wish that files become a version of an id: all of it but the files."""

    id: str
    source: str = "upload"  # where the files are
    tenant: str | None = None  # that is to own a new id; None: the id tells
    pin: bool = False  # False: a known id's pin stays
    metadata: Mapping[str, Any] | None = None  # None: a known id's stays
    allow_noop: bool = False
    activate: bool = True  # the bare id means this version from now on
    digest: str | None = None  # that the version must come to have
    may_change: bool = True  # False: a known id gets no other content
    by_admin: bool = False  # the operator's own key registers it
    quota: Quota = NO_LIMITS  # the owner's

    def owner_in(self, snapshot: Snapshot) -> str:
        """The tenant that owns the id, or will own it."""
        known = snapshot.entries.get(self.id)
        return tenant_of(self.id, self.tenant) if known is None else known.tenant

    def check(self, snapshot: Snapshot, digest: str = "", num_bytes: int = 0) -> None:
        """Called before anything is fetched, once the version's digest and size are known, and in the commit.

        Raises InvalidRequestError, ConflictError, UnreadableRecordError, QuotaExceededError.
        """
        check_adapter_id(self.id)
        snapshot.check_held(self.id)
        known = snapshot.entries.get(self.id)
        if known is not None and self.tenant is not None and known.tenant != self.tenant:
            raise ConflictError(f"The adapter `{self.id}` belongs to another tenant.")
        if self.id in snapshot.aliases:
            raise ConflictError(f"`{self.id}` is an alias of `{snapshot.aliases[self.id]}`.")
        check_tenant(self.tenant)
        check_metadata(self.metadata)
        self._check_quota(snapshot, known, digest, num_bytes)

    def _check_quota(self, snapshot: Snapshot, known: CatalogEntry | None, digest: str, num_bytes: int) -> None:
        """Each version counts with all of its bytes even if other tenants have the same content: a tenant must not
        learn from its own figures what others have. `digest` empty: only the number of ids is checked.
        """
        quota = self.quota
        if quota.max_adapters is None and quota.max_stored_bytes is None:
            return
        owner = self.owner_in(snapshot)
        own = [entry for entry in snapshot.entries.values() if entry.tenant == owner]
        if known is None and quota.max_adapters is not None and len(own) >= quota.max_adapters:
            raise QuotaExceededError(
                f"The tenant `{owner}` has {len(own)} adapters and may have {quota.max_adapters}: delete one first."
            )
        if known is not None and digest in known.digests:
            return
        held = sum(version.num_bytes for entry in own for version in entry.versions)
        if digest and quota.max_stored_bytes is not None and held + num_bytes > quota.max_stored_bytes:
            raise QuotaExceededError(
                f"The tenant `{owner}` has {held} bytes of adapters and may have {quota.max_stored_bytes}; this "
                f"version has {num_bytes}: delete some first."
            )

    def check_content(self, snapshot: Snapshot, digest: str) -> None:
        """`digest`: of the files as they were sent. Raises OtherContentError."""
        known = snapshot.entries.get(self.id)
        if not self.may_change and known is not None and not known.has_content(digest):
            raise OtherContentError(f"`{self.id}` has other content.")

    def commit(
        self, ledger: CatalogLedger, version: VersionEntry, holder: str = ""
    ) -> tuple[CatalogEntry, VersionEntry, bool]:
        """Commit the version durably; `holder`'s lease ends. Returns (entry, version, whether it is new).

        The version number is chosen here; the same content keeps its number. The owner's quota holds even if several
        register at once. Raises what `check` and `check_content` do, and AdapterUnavailableError if the lease has run
        out and the blob may be gone.
        """

        def edit(state: CatalogState) -> tuple[Changes, tuple[CatalogEntry, VersionEntry, bool]]:
            old, entry = state.snapshot.entries.get(self.id), self._entry_in(state.snapshot, version)
            added = next(one for one in entry.versions if one.digest == version.digest)
            released = _released(state, version.digest, holder) if holder else {}
            is_new = old is None or not old.has_version(added.version)
            return {**saved(entry), **released}, (entry, added, is_new)

        return ledger.change(edit)

    def _entry_in(self, snapshot: Snapshot, version: VersionEntry) -> CatalogEntry:
        """The id's entry with this version. Raises what `check` and `check_content` raise."""
        self.check(snapshot, version.digest, version.num_bytes)
        self.check_content(snapshot, version.sent_digest)
        known = snapshot.entries.get(self.id)
        if known is None:
            return new_entry(self.id, tenant_of(self.id, self.tenant), version, self.pin, self.metadata)
        return with_version(known, version, self.pin, self.metadata, self.activate)


def _released(state: CatalogState, digest: str, holder: str) -> Changes:
    """The change that ends a lease. Raises AdapterUnavailableError if nothing has kept the blob."""
    lease = state.lease_on(digest)
    if holder not in lease.holders and digest not in state.snapshot.digests:
        raise AdapterUnavailableError("The adapter's bytes were deleted meanwhile; try again.", retry_after=1)
    return lease_change(digest, lease.without(holder))


def new_entry(
    name: str, tenant: str, version: VersionEntry, pinned: bool, metadata: Mapping[str, Any] | None
) -> CatalogEntry:
    """The entry of a new id."""
    first = replace(version, version=1)
    return CatalogEntry(name, tenant, pinned, version.created, dict(metadata or {}), 1, Route(1), (first,))


def with_version(
    entry: CatalogEntry, version: VersionEntry, pinned: bool, metadata: Mapping[str, Any] | None, activate: bool
) -> CatalogEntry:
    """The entry with this content; known content keeps its number. `activate`: the bare id means it from now on.

    Whose key registered a chat template is noted again: once the admin's did, the admin has vouched for it.
    """
    known = next((old for old in entry.versions if old.digest == version.digest), None)
    number = entry.last_version + 1 if known is None else known.version
    changed = replace(
        entry,
        pinned=entry.pinned or pinned,
        metadata=entry.metadata if metadata is None else dict(metadata),
        last_version=max(entry.last_version, number),
        versions=_vouched(entry.versions, version) if known else (*entry.versions, replace(version, version=number)),
    )
    return routed(changed, number, None) if activate else changed


def _vouched(versions: tuple[VersionEntry, ...], again: VersionEntry) -> tuple[VersionEntry, ...]:
    note = noted_template(again)
    if note is None or not note.is_vouched:
        return versions
    return tuple(vouched(version) if version.digest == again.digest else version for version in versions)


def routed(entry: CatalogEntry, version: int | None, canary: Canary | None) -> CatalogEntry:
    """The entry with another route; `version` None: its default version stays. Raises InvalidRequestError."""
    new = entry.route.version if version is None else version
    for number in (new, *([canary.version] if canary else ())):
        if not entry.has_version(number):
            known = ", ".join(str(other.version) for other in entry.versions)
            raise InvalidRequestError(f"`{entry.name}` has no version {number}; it has {known}.", param="version")
    if canary is not None and canary.version == new:
        raise InvalidRequestError("The canary must be another version than the default.", param="canary")
    return replace(entry, route=Route(new, canary, _history(entry, new)))


def rolled_back(entry: CatalogEntry) -> CatalogEntry:
    """The entry without its canary or, if there is none, with the default version before. Raises ConflictError."""
    route = entry.route
    if route.canary is not None:
        return replace(entry, route=replace(route, canary=None))
    if not route.history:
        raise ConflictError(f"`{entry.name}` has no version to go back to.")
    return replace(entry, route=Route(route.history[-1], None, route.history[:-1]))


def shared(entry: CatalogEntry, shared_with: Collection[str]) -> CatalogEntry:
    """The entry shared with these tenants, and no others. Raises InvalidRequestError."""
    check_sharing(shared_with)
    names = set(shared_with) - {entry.tenant}
    return replace(entry, shared_with=(EVERYBODY,) if EVERYBODY in names else tuple(sorted(names)))


def described(entry: CatalogEntry, metadata: Mapping[str, Any]) -> CatalogEntry:
    """The entry with other metadata. Raises InvalidRequestError."""
    check_metadata(metadata)
    return replace(entry, metadata=dict(metadata))


def check_removal(entry: CatalogEntry, gone: Sequence[VersionEntry]) -> None:
    """Raises ConflictError if the default version is to go and the route does not say which of the others comes back:
    a version that nobody chose must not begin to answer.
    """
    left = {version.version for version in entry.versions if version not in gone}
    if left and entry.route.version not in left and left.isdisjoint(entry.route.history):
        served = f"`{entry.name}` means version {entry.route.version}, and none of its others was served before"
        raise ConflictError(f"{served}: choose the one that it is to mean (PUT .../route) before this one is deleted.")


def without(entry: CatalogEntry, gone: Sequence[VersionEntry]) -> CatalogEntry | None:
    """The entry without some versions; None if none is left.

    If the default version is removed, the one before it in the history is back, or else the newest that is left.
    """
    left = tuple(version for version in entry.versions if version not in gone)
    if not left:
        return None
    numbers = {version.version for version in left}
    history = tuple(number for number in entry.route.history if number in numbers)
    canary = entry.route.canary if entry.route.canary and entry.route.canary.version in numbers else None
    if entry.route.version in numbers:
        return replace(entry, versions=left, route=Route(entry.route.version, canary, history))
    default = history[-1] if history else left[-1].version
    kept = canary if canary and canary.version != default else None
    return replace(entry, versions=left, route=Route(default, kept, history[:-1]))


def _history(entry: CatalogEntry, new: int) -> tuple[int, ...]:
    if new == entry.route.version:
        return entry.route.history
    return (*(number for number in entry.route.history if number != new), entry.route.version)[-MAX_HISTORY:]


@dataclass(frozen=True, slots=True)
class TenantRemoval:
    """The removed adapter ids, and the digests that no version names any more."""

    names: tuple[str, ...]
    strays: tuple[str, ...]


def without_tenant(state: CatalogState, tenant: str, drain_holder: str, now: float) -> tuple[Changes, TenantRemoval]:
    """One commit that removes a tenant's adapters, their aliases, and its share in other tenants' adapters.

    `drain_holder` leases the strays from then on. `now`: Unix seconds.
    """
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
        changes |= state.leased_by(drain_holder, digest, now)
    return changes, TenantRemoval(tuple(entry.name for entry in gone), strays)


def _digests(entries: list[CatalogEntry]) -> set[str]:
    return {digest for entry in entries for digest in entry.digests}
