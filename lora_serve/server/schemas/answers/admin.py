"""Answers of the admin API. Times are Unix seconds, figures of the engine are those of `core/stats.py`."""

from __future__ import annotations

from typing import Any, Literal

from lora_serve.core.adapter import AdapterState
from lora_serve.core.stats import (
    AdapterCounters,
    BatchInfo,
    ConstraintStats,
    MemoryStats,
    ReplicaState,
    SlotInfo,
    SpeculationStats,
    SwapStats,
    TierStats,
)
from lora_serve.core.tenant import Role
from lora_serve.server.schemas.answers.base import Answer, Deleted, Page


class Canary(Answer):
    version: int
    percent: float


class VersionRoute(Answer):
    version: int
    canary: Canary | None
    history: list[int]


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
    probe: Probe | None
    warnings: list[str]
    base_fingerprint: str | None
    config: dict[str, Any]
    state: AdapterState
    tiers: list[str]
    replicas: list[PlaceCard] | None
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


class AdapterPage(Page):
    data: list[AdapterCard]


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


class TenantPage(Page):
    data: list[TenantCard]


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


class CallerCard(Answer):
    object: Literal["caller"]
    tenant: str
    role: Role
    key_id: str
    may_use_base: bool
    quota: dict[str, Any]
    key_quota: dict[str, Any]


class UsageLine(Answer):
    """Figures of one group; the fields that `by` names stand beside them."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_seconds: float
    load_seconds: float
    compute_seconds: float
    residency_byte_seconds: float


class UsageTable(Answer):
    object: Literal["list"]
    data: list[UsageLine]
    by: list[str]
    is_complete: bool


class BatcherLimits(Answer):
    max_num_seqs: int
    max_num_batched_tokens: int
    batch_wait_ms: float


class BatcherCard(BatcherLimits):
    preferred_batch_size: int | None
    latency_target_ms: float | None
    inter_token_target_ms: float | None
    in_force: BatcherLimits
    measured: dict[str, float | None]
    step_cost_us: dict[str, float]
    step_cost_error: float | None
    reason: str


class EngineCard(Answer):
    """`core/stats.py: EngineStats`, with the batcher under the names that PUT takes."""

    num_running: int
    num_waiting: int
    running_adapters: list[str]
    waiting_adapters: list[str]
    max_loras: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    num_preemptions: int
    slots: list[SlotInfo]
    host_digests: list[str]
    loading_digests: list[str]
    tiers: dict[str, TierStats]
    adapters: dict[str, AdapterCounters]
    recent_batches: list[BatchInfo]
    num_steps: int
    step_seconds: float
    num_prefix_queries: int
    num_prefix_hits: int
    batcher: BatcherCard | None
    memory: MemoryStats
    swap: SwapStats
    num_constrained: int
    num_forced: int
    constraints: ConstraintStats
    speculation: SpeculationStats
    num_hung_loads: int


class ReplicaCard(Answer):
    """`core/stats.py: ReplicaStats`, and what its engine does and holds; 0 until it has told."""

    id: str
    object: Literal["replica"]
    node: str
    state: ReplicaState
    reason: str
    version: str
    base_fingerprint: str
    age_seconds: float
    num_requests: int
    num_servers: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_running_tokens: int
    num_blocks: int
    num_free_blocks: int
    max_loras: int
    slots: list[SlotInfo]
    num_host_adapters: int
    loading_digests: list[str]
    tiers: dict[str, TierStats]


class VersionPlaces(Answer):
    version: int | None
    digest: str
    places: list[PlaceCard]


class AdapterPlaces(Answer):
    id: str
    versions: list[VersionPlaces]


class Fleet(Answer):
    object: Literal["list"]
    data: list[ReplicaCard]
    restarts: int
    adapter: AdapterPlaces | None
