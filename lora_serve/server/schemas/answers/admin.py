"""Answers of the admin API on engines. Times are Unix seconds, figures of the engine are those of `core/stats.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from lora_serve.core.figures import TierStats
from lora_serve.core.stats import EngineStats, ReplicaState, SlotInfo
from lora_serve.server.lifecycle import EngineRestart, ServerState, WarmUpStage
from lora_serve.server.schemas.answers.adapters import AdapterPlace
from lora_serve.server.schemas.answers.base import Answer, with_fields_of

# Fields of the engine's figures that the schema does not name.
_UNNAMED = (
    "steps_by_tokens", "num_step_tokens", "num_waiting_tokens", "num_running_tokens", "replicas", "pid",
    "num_replicas_lost",
)  # fmt: skip


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


@with_fields_of(EngineStats, left_out=_UNNAMED, batcher=BatcherCard | None)
class EngineCard(Answer):
    """`core/stats.py: EngineStats`, with the batcher under the names that PUT takes."""


class QueueCard(Struct):
    """The requests and prompt tokens that wait now, and the fields of `core/config.py: QueueLimits`."""

    num_requests: int
    num_tokens: int
    max_requests: int
    max_tokens: int | None
    max_tenant_requests: int | None
    max_tenant_tokens: int | None


class AdapterLimits(Struct):
    """In force now, under the names that PUT /admin/engine takes; null: no limit."""

    max_loras: int
    adapter_memory: int | None
    adapter_host_memory: int
    max_cpu_loras: int | None


class JournalCard(Struct):
    is_away: bool
    seconds_away: float
    num_losses: int


class RedisCard(Struct):
    """The shared journals as this server last met them."""

    registry: JournalCard
    tenants: JournalCard


class EngineHealth(Struct, kw_only=True):
    """GET /admin/engine/health; times are Unix seconds."""

    object: Literal["engine_health"] = "engine_health"
    state: ServerState
    reason: str
    started: float
    ready_since: float | None
    warm_up: Sequence[WarmUpStage]
    num_restarts: int
    restarts: list[EngineRestart]
    queue: QueueCard
    adapter_limits: AdapterLimits
    store_problem: str | None
    redis: RedisCard | None


class ReplicaCard(Struct, kw_only=True):
    """`core/stats.py: ReplicaStats`, and what its engine does and holds; 0 until it has told."""

    id: str
    object: Literal["replica"] = "replica"
    node: str
    pid: int | None  # of the engine's process, there
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
    loading_digests: Sequence[str]
    tiers: Mapping[str, TierStats]


class VersionPlaces(Struct):
    version: int | None
    digest: str
    places: list[AdapterPlace]


class AdapterPlaces(Struct):
    id: str
    versions: list[VersionPlaces]


class ReplicaInShort(Struct):
    """The figures of an engine that a program asks for often."""

    id: str
    node: str
    state: ReplicaState
    resident: list[str]
    num_running: int
    num_waiting: int
    restarts: int


class RouterCard(Struct):
    name: str


class Fleet(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ReplicaCard]
    replicas: list[ReplicaInShort]
    router: RouterCard | None
    restarts: int
    adapter: AdapterPlaces | None
