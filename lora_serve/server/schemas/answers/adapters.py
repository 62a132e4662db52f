"""Answers of the admin API on adapters, their registration and their names. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from msgspec import UNSET, Struct, UnsetType

from lora_serve.adapters.catalog.entry import Canary
from lora_serve.adapters.sources.base import Stage
from lora_serve.core.adapter import AdapterState
from lora_serve.core.tier_stats import EvictionReason
from lora_serve.server.schemas.answers.base import Item, Page


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


class FoundPage(Page[Item], kw_only=True):
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
