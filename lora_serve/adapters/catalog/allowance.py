"""A tenant's limits on the number, the stored bytes and the pinned bytes of its adapters."""

from __future__ import annotations

from lora_serve.adapters.catalog.entry import CatalogEntry, tenant_of
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.errors import ForbiddenError, QuotaExceededError
from lora_serve.core.tenant import Quota


def owner_of(snapshot: Snapshot, name: str, tenant: str | None) -> str:
    """The tenant that owns an adapter, or will own it."""
    known = snapshot.entries.get(name)
    return tenant_of(name, tenant) if known is None else known.tenant


def check_allowance(snapshot: Snapshot, owner: str, name: str, digest: str, num_bytes: int, quota: Quota) -> None:
    """Raises QuotaExceededError if `owner` may not have one more version of this content and size.

    Each version counts with all of its bytes even if other tenants have the same content: a tenant must not learn from
    its own figures what others have. `digest` empty: the content is not known yet, only the number of ids is checked.
    """
    if quota.max_adapters is None and quota.max_stored_bytes is None:
        return
    own = [entry for entry in snapshot.entries.values() if entry.tenant == owner]
    known = next((entry for entry in own if entry.name == name), None)
    if known is None and quota.max_adapters is not None and len(own) >= quota.max_adapters:
        raise QuotaExceededError(
            f"The tenant `{owner}` has {len(own)} adapters and may have {quota.max_adapters}: delete one first."
        )
    if known is not None and digest in {version.digest for version in known.versions}:
        return
    held = sum(version.num_bytes for entry in own for version in entry.versions)
    if digest and quota.max_stored_bytes is not None and held + num_bytes > quota.max_stored_bytes:
        raise QuotaExceededError(
            f"The tenant `{owner}` has {held} bytes of adapters and may have {quota.max_stored_bytes}; this version "
            f"has {num_bytes}: delete some first."
        )


def check_pinned(snapshot: Snapshot, entry: CatalogEntry, max_bytes: int) -> None:
    """Raises ForbiddenError if pinning `entry` would take its tenant beyond `max_bytes` of pinned versions."""
    others = (one for one in snapshot.entries.values() if one.tenant == entry.tenant and one.name != entry.name)
    pinned = [entry, *(one for one in others if one.pinned)]
    needed = sum(version.num_bytes for one in pinned for version in one.routed)
    if needed > max_bytes:
        raise ForbiddenError(
            f"With this one, {needed} bytes would be pinned; {max_bytes} bytes of device memory are guaranteed to "
            f"the tenant `{entry.tenant}`."
        )
