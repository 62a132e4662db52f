"""Answers of the admin API on adapters, their registration and their names. Times are Unix seconds."""

from __future__ import annotations

from typing import Any, Literal

from lora_serve.core.adapter import AdapterState
from lora_serve.server.background.registering import Stage
from lora_serve.server.schemas.answers.base import Answer, Deleted, Page


class Canary(Answer):
    version: int
    percent: float


class RoutedAnswers(Answer):
    """Answers of the last minutes for which the route, as it is now, chose this version."""

    version: int
    requests: int
    errors: int


class VersionRoute(Answer):
    """The version that the id means. `answers`: of both sides of a canary, within the activity's `window_seconds`."""

    version: int
    canary: Canary | None
    history: list[int]
    answers: list[RoutedAnswers]


class Probe(Answer):
    """The smoke test's largest change of a logit, and the largest logit."""

    max_logit_change: float
    max_logit: float


class PlaceCard(Answer):
    """One engine that holds an adapter, or loads it."""

    replica: str
    tiers: list[Literal["host", "device"]]
    is_loading: bool
    is_pinned: bool
    num_rows: int


class ActivityCard(Answer):
    """Answers that ended: within the last minute, and within the last `window_seconds`. Of this server alone, since its
    start; a tenant's own.
    """

    requests_per_minute: int
    last_used: int | None
    window_seconds: int
    requests: int
    errors: int


class VersionCard(Answer):
    version: int
    created: int
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
    config: dict[str, Any]
    state: AdapterState
    tiers: list[str]
    replicas: list[PlaceCard] | None
    activity: ActivityCard
    hits: int
    misses: int
    loads: int
    evictions: int
    eviction_reasons: dict[str, int]
    last_eviction: str | None
    last_load_ms: float
    last_load: dict[str, Any] | None


class AdapterCard(VersionCard):
    """The default version's facts, and every version's below."""

    id: str
    object: Literal["adapter"]
    tenant: str
    shared_with: list[str]
    pinned: bool
    metadata: dict[str, Any]
    route: VersionRoute
    aliases: list[str]
    versions: list[VersionCard]


class AdapterRow(Answer):
    """`fields=summary`: the facts of a list."""

    id: str
    object: Literal["adapter"]
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


class AdapterPage(Page):
    """`total`: all that the query finds; left out where cards are walked through by name."""

    data: list[AdapterCard | AdapterRow]
    unreadable: list[str] | None = None
    total: int | None = None


class RegistrationCard(Answer):
    id: str
    stage: Stage
    bytes: int
    total_bytes: int | None
    started: float


class RegistrationList(Answer):
    object: Literal["list"]
    data: list[RegistrationCard]


class DeletedAdapter(Deleted):
    id: str
    object: Literal["adapter"]
    version: int | None


class Alias(Answer):
    alias: str
    target: str


class AliasList(Answer):
    object: Literal["list"]
    data: list[Alias]


class DeletedAlias(Deleted):
    alias: str
