"""The directory of tenants and keys: records in a journal, and an immutable snapshot of them for readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.ledger import Changes, Ledger
from lora_serve.core.tenant import NO_LIMITS, ApiKey, Quota, Role, Tenant
from lora_serve.tenancy.directory import edits
from lora_serve.tenancy.directory.keys import digest_of, new_secret
from lora_serve.tenancy.directory.state import KEY, TENANT, DirectoryState, saved

TITLE = "tenant directory"
Clock = Callable[[], float]  # Unix seconds


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
        """Raises ConflictError."""
        tenant = Tenant(name, quota, may_use_base, self.clock(), offload)
        return self.ledger.change(lambda state: (edits.with_tenant(state, tenant), tenant))

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
            changes = edits.without_tenant(state, name)
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
        """The record, and the secret, which nobody can show again. `expires`: Unix seconds. `maker`: id of the key that
        asks for it, if it is one of ours; it must not have been revoked, at another replica either.

        Raises NotFoundError, ConflictError, AuthenticationError.
        """
        now = self.clock()
        key_id, secret = new_secret()
        key = ApiKey(key_id, tenant, role, digest_of(secret), label, quota, now, expires)

        def edit(state: DirectoryState) -> tuple[Changes, tuple[ApiKey, str]]:
            edits.check_maker(state, maker, now)
            return edits.with_key(state, key, now), (key, secret)

        return self.ledger.change(edit)

    def revoke_key(self, tenant: str, key_id: str) -> ApiKey:
        """Ends a key: at once on this server, within a second on all replicas. Raises NotFoundError."""
        now = self.clock()
        return self.ledger.change(lambda state: edits.revoked(state, tenant, key_id, now))

    def free_key(self, key_id: str) -> None:
        """Deletes the record of a key that cannot be read."""
        record = KEY + key_id
        self.ledger.change(lambda state: ({record: None} if record in state.held else {}, None))

    def note_uses(self, uses: Mapping[str, float]) -> None:
        """Writes down when keys were last used, in one commit."""
        self.ledger.change(lambda state: (edits.used(state, uses), None))

    def refresh(self) -> None:
        """Reads what other replicas wrote. Raises AdapterUnavailableError."""
        self.ledger.refresh()

    def close(self) -> None:
        self.ledger.close()
