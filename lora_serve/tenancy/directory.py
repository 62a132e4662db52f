"""The directory of tenants and keys: records in a journal, and an immutable snapshot of them for readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal, open_mirror
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.ledger import Changes, Follower, Ledger
from lora_serve.adapters.catalog.opening import redis_journal
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.core.errors import AuthenticationError, ConflictError
from lora_serve.core.tenant import NO_LIMITS, ApiKey, Quota, Role, Tenant
from lora_serve.tenancy.directory_state import (
    KEY,
    REVOKED,
    TENANT,
    DirectoryState,
    digest_of,
    document_of,
    new_secret,
    record_of,
    saved,
    saved_uses,
)

if TYPE_CHECKING:
    from lora_serve.core.config import AdapterConfig

TITLE = "tenant directory"
JOURNAL = "tenants"  # in Redis' keys
FILE_NAME, MIRROR_NAME = "tenants.sqlite3", "tenants-mirror.sqlite3"
MAX_KEYS = 1000  # of one tenant that open something
KEPT = 30 * 86400.0  # seconds for which a revoked key is still listed
MAX_ENDED = 1000  # of those of one tenant, or making and revoking keys would grow the directory without bound
Clock = Callable[[], float]  # Unix seconds
Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]


class Directory:
    """Tenants and keys. Every method may be called from any thread; changes are durable on return and raise
    AdapterUnavailableError if the journal cannot be reached.
    """

    def __init__(self, journal: Journal, clock: Clock = time.time) -> None:
        """Raises AdapterUnavailableError."""
        self.ledger = Ledger(journal, DirectoryState(), TITLE)
        self.clock = clock

    @property
    def snapshot(self) -> DirectoryState:
        """The newest state that this server knows."""
        return self.ledger.state

    def quota_of(self, tenant: str) -> Quota:
        """The tenant's quota now; no limits for a tenant without a record. Raises UnreadableRecordError."""
        self.snapshot.check_held(TENANT, tenant)
        known = self.snapshot.tenants.get(tenant)
        return NO_LIMITS if known is None else known.quota

    def may_leave(self, tenant: str) -> bool:
        """Whether neighbours may compute answers for the tenant now; one without a record has not forbidden it, one
        whose record cannot be read may have.
        """
        known = self.snapshot.tenants.get(tenant)
        return TENANT + tenant not in self.snapshot.held if known is None else known.offload

    def create_tenant(
        self, name: str, quota: Quota = NO_LIMITS, may_use_base: bool = True, offload: bool = True
    ) -> Tenant:
        """Raises ConflictError, UnreadableRecordError."""
        tenant = Tenant(name, quota, may_use_base, self.clock(), offload)

        def edit(state: DirectoryState) -> tuple[Changes, Tenant]:
            state.check_held(TENANT, name)
            if name in state.tenants:
                raise ConflictError(f"The tenant `{name}` is there already.")
            return saved(tenant), tenant

        return self.ledger.change(edit)

    def change_tenant(self, name: str, change: Callable[[Tenant], Tenant]) -> Tenant:
        """Replace a tenant's record by what `change` makes of it. Raises NotFoundError, what `change` raises."""

        def edit(state: DirectoryState) -> tuple[Changes, Tenant]:
            old = state.tenant(name)
            new = change(old)
            return ({} if new == old else saved(new)), new

        return self.ledger.change(edit)

    def delete_tenant(self, name: str) -> bool:
        """Deletes a tenant and its keys. Returns whether there was either."""

        def edit(state: DirectoryState) -> tuple[Changes, bool]:
            keys = state.keys_of(name)
            changes: Changes = {KEY + key.id: None for key in keys}
            changes |= saved_uses(state, {}, frozenset(key.id for key in keys))
            if name in state.tenants or TENANT + name in state.held:
                changes[TENANT + name] = None
            return changes, bool(changes)

        return self.ledger.change(edit)

    def create_key(
        self,
        tenant: str,
        role: Role,
        label: str = "",
        expires: float | None = None,
        quota: Quota = NO_LIMITS,
        maker: str = "",
    ) -> tuple[ApiKey, str]:
        """The record, and the secret, which cannot be shown again. `expires`: Unix seconds. `maker`: id of the key that
        asks for it, if it is one of ours; it must not have been revoked, at another replica either.

        Raises NotFoundError, ConflictError, AuthenticationError.
        """
        now = self.clock()
        key_id, secret = new_secret()
        key = ApiKey(key_id, tenant, role, digest_of(secret), label, quota, now, expires)

        def edit(state: DirectoryState) -> tuple[Changes, tuple[ApiKey, str]]:
            own = state.keys.get(maker)
            if maker and (own is None or not own.is_valid(now)):
                raise AuthenticationError(REVOKED)
            return _with_key(state, key, now), (key, secret)

        return self.ledger.change(edit)

    def revoke_key(self, tenant: str, key_id: str) -> ApiKey:
        """Ends a key: at once on this server, within a second on all replicas. Raises NotFoundError."""
        now = self.clock()

        def edit(state: DirectoryState) -> tuple[Changes, ApiKey]:
            key = state.key(tenant, key_id)
            ended = key if key.revoked is not None else replace(key, revoked=now)
            return ({} if ended is key else saved(ended)), ended

        return self.ledger.change(edit)

    def free_key(self, key_id: str) -> None:
        """Deletes the record of a key that cannot be read."""
        record = KEY + key_id
        self.ledger.change(lambda state: ({record: None} if record in state.held else {}, None))

    def note_uses(self, uses: Mapping[str, float]) -> None:
        """Writes down when keys were last used, in one commit: times later than the known ones, of keys that exist."""

        def edit(state: DirectoryState) -> tuple[Changes, None]:
            later = {k: t for k, t in uses.items() if k in state.keys and t > (state.last_used(k) or 0.0)}
            return saved_uses(state, later), None

        self.ledger.change(edit)

    def refresh(self) -> None:
        """Reads what other replicas wrote. Raises AdapterUnavailableError."""
        self.ledger.refresh()

    def close(self) -> None:
        self.ledger.close()


def _with_key(state: DirectoryState, key: ApiKey, now: float) -> Changes:
    """Changes that write a key, and remove ended ones: those that were revoked long ago, and others only if there are
    too many. By the clock alone no key has expired for good: it may be wrong. Raises NotFoundError for a tenant that is
    not there, ConflictError if it has too many keys.
    """
    state.tenant(key.tenant)
    old = state.keys_of(key.tenant)
    if sum(other.is_valid(now) for other in old) >= MAX_KEYS:
        raise ConflictError(f"The tenant `{key.tenant}` has {MAX_KEYS} keys: revoke some first.")
    ended = [other for other in old if not other.is_valid(now)]
    ended.sort(key=lambda other: (other.revoked is None, _ended(other, now)))
    late = len(ended) - MAX_ENDED
    gone = frozenset(
        other.id
        for i, other in enumerate(ended)
        if i < late or (other.revoked is not None and other.revoked + KEPT < now)
    )
    return {KEY + key_id: None for key_id in gone} | saved_uses(state, {}, gone) | saved(key)


def _ended(key: ApiKey, now: float) -> float:
    """When the key was revoked or expired, Unix seconds; `now` if it is still valid."""
    return min(time for time in (key.revoked, key.expires, now) if time is not None)


@contextmanager
def open_directory(config: AdapterConfig, monitor: StoreMonitor | None = None) -> Iterator[Directory]:
    """The directory, as long as the block lasts; a shared one follows the other replicas. The caller holds the store.

    While Redis cannot be reached, the last state that was read is in force. `monitor`: opens for writing
    later what can only be read now. Raises ConfigError.
    """
    with closing(Directory(_journal(config, monitor))) as directory:
        if config.redis_url is None:
            yield directory
            return
        with closing(Follower(directory.ledger, lambda: None, TITLE)) as follower:
            follower.start()
            yield directory


def _journal(config: AdapterConfig, monitor: StoreMonitor | None) -> Journal:
    if config.redis_url is None:
        return SqliteJournal(config.store / FILE_NAME, TITLE, monitor)
    shared = redis_journal(config.redis_url, config.redis_prefix, JOURNAL, TITLE)
    return MirroredJournal(shared, open_mirror(config.store / MIRROR_NAME, TITLE, monitor), merge_branches)


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with the names that may have changed on both branches, (ours, theirs), after a shared journal was
    started from an older state and went on.

    A record that is gone on one branch is gone, a key that was ended on one is ended, and otherwise theirs, the branch
    that went on, counts. Keys without a tenant are dropped.
    """
    merged = dict(records)
    for name, (ours, theirs) in contested.items():
        if ours is None or theirs is None:
            merged.pop(name, None)
        else:
            merged[name] = _ended_as_either(name, ours, theirs) if name.startswith(KEY) else theirs
    return {name: text for name, text in merged.items() if not _is_orphan(name, text, merged)}


def _ended_as_either(name: str, ours: str, theirs: str) -> str:
    our, their = (record_of(ApiKey, name.removeprefix(KEY), text) for text in (ours, theirs))
    if our is None or their is None:
        return theirs if our is None else ours
    revoked, expires = _sooner(our.revoked, their.revoked), _sooner(our.expires, their.expires)
    return document_of(replace(their, revoked=revoked, expires=expires))


def _sooner(one: float | None, other: float | None) -> float | None:
    times = [time for time in (one, other) if time is not None]
    return min(times, default=None)


def _is_orphan(name: str, text: str, records: Mapping[str, str]) -> bool:
    """True for a key whose tenant is gone: it would be valid again once there is a tenant of that name."""
    key = record_of(ApiKey, name.removeprefix(KEY), text) if name.startswith(KEY) else None
    return key is not None and TENANT + key.tenant not in records
