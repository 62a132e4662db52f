"""Answers of the admin API about tenants, their keys, their usage and their acts. Times are Unix seconds."""

from __future__ import annotations

from typing import Any, Literal

from lora_serve.core.tenant import Role
from lora_serve.server.schemas.answers.base import Answer, Deleted, Page, with_fields_of
from lora_serve.tenancy.usage.figures import UsageFigures


class AuditEntry(Answer):
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


class AuditPage(Page):
    data: list[AuditEntry]
    is_complete: bool


class TenantCard(Answer):
    name: str
    object: Literal["tenant"]
    may_use_base: bool
    offload: bool
    quota: dict[str, Any]
    created: int
    num_keys: int
    num_adapters: int


class TenantUse(Answer):
    """The use of each limit in `quota`, by its name; null: nobody counts it."""

    object: Literal["tenant_use"]
    tenant: str
    use: dict[str, int | None]


class TenantPage(Page):
    data: list[TenantCard]
    unreadable: list[str] | None = None


class DeletedTenant(Deleted):
    name: str
    object: Literal["tenant"]
    adapters: list[str]


class KeyCard(Answer):
    id: str
    object: Literal["api_key"]
    tenant: str
    role: Role
    label: str
    quota: dict[str, Any]
    active: bool
    created: int
    expires: int | None
    revoked: int | None
    last_used: int | None


class NewKey(KeyCard):
    """The only answer that shows the secret."""

    secret: str


class KeyList(Answer):
    object: Literal["list"]
    data: list[KeyCard]
    unreadable: list[str] | None = None


class CallerCard(Answer):
    object: Literal["caller"]
    tenant: str
    role: Role
    key_id: str
    may_use_base: bool
    quota: dict[str, Any]
    key_quota: dict[str, Any]
    has_neighbours: bool  # of the server (--overflow)


@with_fields_of(UsageFigures)
class UsageLine(Answer):
    """Figures of one group; the fields that `by` names stand beside them."""


class UsageTable(Answer):
    object: Literal["list"]
    data: list[UsageLine]
    by: list[str]
    is_complete: bool
