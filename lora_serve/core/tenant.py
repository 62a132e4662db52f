"""Tenants, their keys, and the caller that a request came from."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from lora_serve.core.errors import InvalidRequestError

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
WARM_UP = "warm-up: "  # with which the tenants of warm-up requests begin, and no name does
MAX_LIMIT = 10**15  # of any limit in a quota
EVERYBODY = "*"  # in place of a tenant's name: an adapter is shared with all


class Role(enum.StrEnum):
    """The rights of a key."""

    ADMIN = "admin"  # everything, of every tenant
    TENANT_ADMIN = "tenant-admin"  # its own tenant's adapters and keys, and inference
    INFERENCE = "inference"
    METRICS = "metrics"  # reads /metrics with all names, and nothing else

    def includes(self, other: Role) -> bool:
        """True if a key of this role may do all that the other role may, and make keys of that role."""
        if Role.METRICS in (self, other):
            return self in (other, Role.ADMIN)
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER = (Role.INFERENCE, Role.TENANT_ADMIN, Role.ADMIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The limits of a tenant, or of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None  # rows
    max_queued: int | None = None  # requests
    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    device_bytes_guaranteed: int | None = None
    device_bytes_max: int | None = None
    registrations_per_minute: int | None = None  # uploads too


NO_LIMITS = Quota()
# Not of keys.
TENANT_LIMITS = frozenset(("max_adapters", "max_stored_bytes", "device_bytes_guaranteed", "device_bytes_max"))


@dataclass(frozen=True, slots=True)
class Tenant:
    """The record of a tenant."""

    name: str
    quota: Quota = NO_LIMITS
    may_use_base: bool = True
    created: float = 0.0  # Unix seconds
    offload: bool = True  # neighbours may compute answers for it, and with its adapters


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The record of a key; the secret itself is nowhere."""

    id: str  # 12 characters, the part of the secret that may be shown
    tenant: str
    role: Role
    digest: str = field(repr=False)  # SHA-256 of the whole secret, hex
    label: str = ""
    quota: Quota = NO_LIMITS
    created: float = 0.0  # Unix seconds, as the two below
    expires: float | None = None
    revoked: float | None = None

    def is_valid(self, now: float) -> bool:
        """True if the key is neither revoked nor expired at `now`, in Unix seconds."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Made by an `Authenticator` only, never from a field of the request."""

    tenant: str
    role: Role = Role.INFERENCE
    key_id: str = ""  # "admin": the admin key; empty: authentication is off
    quota: Quota = NO_LIMITS  # of the tenant
    key_quota: Quota = NO_LIMITS
    may_use_base: bool = True
    sees_all: bool = False  # may use and list every tenant's adapters
    since: float = 0.0  # Unix seconds when the tenant was made; 0: it has no record

    @property
    def cache_scope(self) -> str:
        """The scope of the KV cache: a tenant that was deleted and made again finds no blocks of the former."""
        return f"{self.tenant}\0{self.since!r}" if self.since else ""

    @property
    def scope(self) -> str | None:
        """The tenant whose adapters the caller sees; None: all tenants'."""
        return None if self.sees_all else self.tenant


def is_visible(owner: str, shared_with: Collection[str], tenant: str | None) -> bool:
    """True if `tenant` (None: a caller that sees all) may know of an adapter of tenant `owner`."""
    return tenant is None or owner == tenant or tenant in shared_with or EVERYBODY in shared_with


LOCAL_CALLER = Caller("default", sees_all=True)  # authentication is off: one user, one machine
CLIENT_CALLER = Caller("default", Role.INFERENCE, "api-key", sees_all=True)  # --api-key
ADMIN_CALLER = Caller("admin", Role.ADMIN, "admin", sees_all=True)


def check_tenant_name(name: str, param: str = "tenant") -> str:
    """Return `name` unchanged if it may be a tenant's, else raise InvalidRequestError."""
    if not TENANT_NAME.match(name) or ".." in name:
        pattern = TENANT_NAME.pattern.removesuffix("\\Z")
        raise InvalidRequestError(f"A tenant's name must match {pattern} and hold no '..'.", param=param)
    return name


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """Bytes of a tenant's adapters on the device."""

    tenant: str
    guaranteed: int = 0  # other tenants' adapters never evict it below these
    at_most: int | None = None  # beyond these the tenant's next adapter evicts one of its own, or waits
