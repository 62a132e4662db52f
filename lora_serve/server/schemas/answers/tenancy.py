"""Answers of the admin API about tenants, their keys, their usage and their acts. Times are Unix seconds."""

from __future__ import annotations

from typing import Literal, TypedDict

from msgspec import UNSET, Struct, UnsetType, field

from lora_serve.core.tenant import Role
from lora_serve.server.schemas.answers.base import Page
from lora_serve.tenancy.usage import UsageFigures


class AuditEntry(TypedDict):
    id: str
    replica: str
    number: int
    action: str
    digest: str
    key: str
    outcome: int
    owner: str
    request_id: str
    role: str
    subject: str
    tenant: str
    time: float
    line_digest: str


class AuditPage(Page[AuditEntry], kw_only=True):
    is_complete: bool


class TenantCard(Struct, kw_only=True):
    name: str
    object: Literal["tenant"] = "tenant"
    may_use_base: bool
    offload: bool
    quota: dict[str, int]
    created: int
    num_keys: int
    num_adapters: int


class TenantUse(Struct, tag_field="object", tag="tenant_use"):
    """The use of each limit in `quota`, by its name; null: nobody counts it."""

    tenant: str
    use: dict[str, int | None]


class TenantPage(Page[TenantCard], kw_only=True):
    unreadable: list[str] | UnsetType = UNSET


class DeletedTenant(Struct, kw_only=True):
    name: str
    object: Literal["tenant"] = "tenant"
    deleted: Literal[True] = True
    adapters: list[str]


class KeyCard(Struct, kw_only=True):
    """`secret`: in the answer that makes the key, and in no other."""

    secret: str | UnsetType = UNSET
    id: str
    object: Literal["api_key"] = "api_key"
    tenant: str
    role: Role
    label: str
    quota: dict[str, int]
    active: bool
    created: int
    expires: int | None
    revoked: int | None
    last_used: int | None


class KeyList(Struct, tag_field="object", tag="list"):
    data: list[KeyCard]
    unreadable: list[str] | UnsetType = UNSET


class CallerCard(Struct, tag_field="object", tag="caller"):
    tenant: str
    role: Role
    key_id: str
    may_use_base: bool
    quota: dict[str, int]
    key_quota: dict[str, int]
    has_neighbours: bool  # of the server (--overflow)


class UsageTable(Struct, kw_only=True):
    """Figures of groups; the fields that `by` names stand before them."""

    object: Literal["list"] = "list"
    data: list[UsageFigures]
    start: int = field(name="from")
    end: int | None = field(name="to")
    by: tuple[str, ...]
    is_complete: bool
