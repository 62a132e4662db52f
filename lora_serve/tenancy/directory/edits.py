"""Edits of the directory: a state goes in, changes come out. Nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.core.errors import AuthenticationError, ConflictError
from lora_serve.core.tenant import ApiKey, Tenant
from lora_serve.tenancy.directory.state import KEY, REVOKED, TENANT, DirectoryState, saved, saved_uses

MAX_KEYS = 1000  # of one tenant that open something
KEPT = 30 * 86400.0  # seconds for which a revoked key is still listed
MAX_ENDED = 1000  # of those of one tenant, or making and revoking keys would grow the directory without bound


def with_tenant(state: DirectoryState, tenant: Tenant) -> Changes:
    """Raises ConflictError, UnreadableRecordError."""
    state.check_held(TENANT, tenant.name)
    if tenant.name in state.tenants:
        raise ConflictError(f"The tenant `{tenant.name}` is there already.")
    return saved(tenant)


def without_tenant(state: DirectoryState, name: str) -> Changes:
    """Changes that delete a tenant and its keys; none if there is neither."""
    keys = state.keys_of(name)
    changes: Changes = {KEY + key.id: None for key in keys}
    changes |= saved_uses(state, {}, frozenset(key.id for key in keys))
    return changes | ({TENANT + name: None} if name in state.tenants or TENANT + name in state.held else {})


def with_key(state: DirectoryState, key: ApiKey, now: float) -> Changes:
    """Also removes ended keys: those that were revoked long ago, and others only if there are too many. By the clock
    alone no key has expired for good: it may be wrong. Raises NotFoundError for a tenant that is not there,
    ConflictError if it has too many keys.
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


def check_maker(state: DirectoryState, maker: str, now: float) -> None:
    """Refuses to make a key in the name of one that has ended. Raises AuthenticationError."""
    key = state.keys.get(maker)
    if maker and (key is None or not key.is_valid(now)):
        raise AuthenticationError(REVOKED)


def revoked(state: DirectoryState, tenant: str, key_id: str, now: float) -> tuple[Changes, ApiKey]:
    """Changes that end a key; none if it was revoked before. Raises NotFoundError."""
    key = state.key(tenant, key_id)
    if key.revoked is not None:
        return {}, key
    ended = replace(key, revoked=now)
    return saved(ended), ended


def used(state: DirectoryState, uses: Mapping[str, float]) -> Changes:
    """Changes that note uses: only times later than the known ones, of keys that exist."""
    return saved_uses(state, {k: t for k, t in uses.items() if k in state.keys and t > (state.last_used(k) or 0.0)})


def _ended(key: ApiKey, now: float) -> float:
    """When the key was revoked or expired, Unix seconds; `now` if it is still valid."""
    return min(time for time in (key.revoked, key.expires, now) if time is not None)
