"""Answers of the admin API on adapters, tenants, keys, usage and acts. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypedDict, TypeVar

from msgspec import UNSET, Struct, UnsetType, field

from lora_serve.adapters.catalog.entry import Canary
from lora_serve.adapters.sources.base import Stage
from lora_serve.core.adapter import AdapterState
from lora_serve.core.figures import EvictionReason
from lora_serve.core.tenant import Role
from lora_serve.tenancy.usage import UsageFigures

Item = TypeVar("Item")


class ListPage(Struct, Generic[Item], kw_only=True):
    """A list that is answered in pages; `last_id` is the `after` of the next."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    last_id: str | None


class RoutedAnswers(Struct):
    """Answers of the last minutes for which the route, as it is now, chose this version."""

    version: int
    requests: int
    errors: int


class VersionRoute(Struct):
    """The version that the id means. `answers`: of both sides of a canary, within the activity's `window_seconds`."""

    version: int
    canary: Canary | None
    history: tuple[int, ...]
    answers: list[RoutedAnswers]


class Probe(TypedDict):
    """The smoke test's largest change of a logit, and the largest logit."""

    max_logit_change: float
    max_logit: float


class AdapterPlace(Struct):
    """One engine that holds an adapter, or is about to. `num_rows`: that hold it in its slot now."""

    replica: str
    tiers: list[Literal["host", "device"]]
    is_loading: bool
    is_pinned: bool
    num_rows: int


class ActivityCard(Struct):
    """Answers that ended: within the last minute, and within the last `window_seconds`. Of this server alone, since its
    start; a tenant's own.
    """

    requests_per_minute: int
    last_used: int | None
    window_seconds: int
    requests: int
    errors: int


class VersionFacts(TypedDict):
    """The facts of one version."""

    digest: str
    rank: int
    targets: list[str]
    bytes: int
    source: str
    kinds: list[str]
    composable: bool
    invocation_tokens: list[int]
    eos_token_ids: list[int]
    probe: Probe | None
    warnings: list[str]
    base_fingerprint: str | None
    chat_template: dict[str, Any] | None
    config: dict[str, Any]
    state: AdapterState
    tiers: list[str]
    replicas: list[AdapterPlace] | None
    activity: ActivityCard
    hits: int
    misses: int
    loads: int
    evictions: int
    eviction_reasons: Mapping[EvictionReason, int]
    last_eviction: EvictionReason | None
    last_load_ms: float
    last_load: dict[str, Any] | None


class VersionCard(VersionFacts):
    version: int
    created: int


class AdapterCard(VersionCard):
    """The default version's facts, and every version's below."""

    id: str
    object: Literal["adapter"]
    tenant: str
    shared_with: list[str]
    pinned: bool
    metadata: dict[str, Any]
    defaults: dict[str, Any] | None
    route: VersionRoute
    aliases: list[str]
    versions: list[VersionCard]


class AdapterRow(Struct, kw_only=True):
    """`fields=summary`: the facts of a list."""

    id: str
    object: Literal["adapter"] = "adapter"
    tenant: str
    version: int
    num_versions: int
    canary: Canary | None
    digest: str
    rank: int
    bytes: int
    kinds: list[str]
    state: AdapterState
    tiers: list[str]
    pinned: bool
    shared_with: list[str]
    aliases: list[str]
    created: int
    activity: ActivityCard


class FoundPage(ListPage[Item], kw_only=True):
    """`total`: all that the query finds; left out where cards are walked through by name."""

    total: int | UnsetType = UNSET
    unreadable: list[str] | UnsetType = UNSET


class AdapterPage(FoundPage[AdapterCard], kw_only=True):
    pass


class RowPage(FoundPage[AdapterRow], kw_only=True):
    """`fields=summary`"""


class RegistrationCard(Struct):
    id: str
    stage: Stage
    bytes: int
    total_bytes: int | None
    started: float


class RegistrationList(Struct, tag_field="object", tag="list"):
    data: list[RegistrationCard]


class DeletedAdapter(Struct, kw_only=True):
    id: str
    object: Literal["adapter"] = "adapter"
    version: int | None
    deleted: Literal[True] = True


class Alias(Struct):
    alias: str
    target: str


class AliasList(Struct, tag_field="object", tag="list"):
    data: list[Alias]


class DeletedAlias(Struct):
    alias: str
    deleted: Literal[True] = True


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


class TenantPage(ListPage[TenantCard], kw_only=True):
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


class AuditPage(ListPage[AuditEntry], kw_only=True):
    is_complete: bool


class UsageTable(Struct, kw_only=True):
    """Figures of groups; the fields that `by` names stand before them."""

    object: Literal["list"] = "list"
    data: list[UsageFigures]
    start: int = field(name="from")
    end: int | None = field(name="to")
    by: tuple[str, ...]
    is_complete: bool
