"""The engine's figures: one frozen snapshot, made on the engine's own thread."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_serve.core.config import BatchLimits


class EvictionReason(enum.StrEnum):
    """The reason for which an adapter left a tier."""

    CAPACITY = "capacity"  # a newcomer needed the room
    ADMIN = "admin"  # asked for by the admin API
    DELETED = "deleted"  # nothing names it any more
    SHRUNK = "shrunk"  # the tier's budget, or its owner's maximum, was made smaller
    CORRUPT = "corrupt"  # its bytes were not what its digest says


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)  # as vLLM groups steps


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One device slot that holds an adapter."""

    index: int
    generation: int
    digest: str
    name: str
    num_bytes: int
    num_rows: int  # rows that hold it now
    pinned: bool
    replica: str = ""  # whose slot it is, in a fleet: each replica counts its slots from 1 on


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The composition of one past batch."""

    num_rows: int
    num_tokens: int
    num_adapters: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """One load of an adapter's weights, in seconds, waiting for a thread not counted."""

    tier: str  # where the bytes came from: "disk", "redis", ...; "none": they were made here
    fetch: float = 0.0  # files onto this machine, bytes into memory
    verify: float = 0.0  # their digests
    parse: float = 0.0  # to tensors, checked against the base
    fold: float = 0.0  # the base's part worked in
    copy: float = 0.0  # into a device slot, on the engine's thread


@dataclass(frozen=True, slots=True)
class AdapterCounters:
    """Per adapter digest, since start."""

    hits: Mapping[str, int] = field(default_factory=dict)  # requests that found it on the device, by the id they named
    misses: Mapping[str, int] = field(default_factory=dict)  # likewise, that had to wait for it
    loads: int = 0
    evictions: int = 0  # from the device
    load_seconds: float = 0.0  # of the last load, fetch to slot
    eviction_reasons: Mapping[EvictionReason, int] = field(default_factory=dict)  # they add up to `evictions`
    last_eviction: EvictionReason | None = None
    last_load: LoadTimes | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier ("device", "host", "disk" or "redis") of the adapter cache."""

    hits: int
    misses: int
    loads: int
    evictions: int
    load_seconds: float  # summed
    num_bytes: int | None  # resident now; None: not known here, as other replicas write to the tier
    budget_bytes: int  # 0: no limit in bytes
    num_items: int | None = None  # resident now; None: not known here
    eviction_reasons: Mapping[EvictionReason, int] = field(default_factory=dict)  # they add up to `evictions`


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """The batcher's limits, the values in force now, and the measurements behind them. Times are seconds."""

    limits: BatchLimits  # the admin's: maxima and targets
    max_rows: int  # this and the next two: of the next step
    max_tokens: int
    window: float
    ttft_p95: float | None = None  # of the last requests, without the load of adapters; None: none yet
    itl_p95: float | None = None
    cost: Mapping[str, float] = field(default_factory=dict)  # seconds for one more of each, as learned
    cost_error: float | None = None  # running median of |predicted / observed - 1| of a step
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes estimated and bytes measured."""

    limit: int | None = None
    weights: int = 0
    kv: int = 0
    adapters: int = 0  # resident on the device now
    activations: int = 0  # estimated for the last batch
    largest: int = 0  # estimate of all of these together, the largest of any batch
    measured_peak: int = 0  # on CUDA what torch had allocated at most, else the process's growth since start
    num_out_of_memory: int = 0  # steps that the device had no memory for, and that were run in parts
    max_tokens: int | None = None  # of a step, for a while after such a one; None: as configured


@dataclass(frozen=True, slots=True)
class SwapStats:
    """Preemptions by kind, and the KV blocks in host memory."""

    num_swapped: int = 0  # preemptions whose blocks were moved to host memory
    num_recomputed: int = 0  # preemptions whose blocks were given up
    num_blocks: int = 0  # that host memory has room for
    num_used: int = 0
    seconds_per_block: float = 0.0  # learned, of one copy


@dataclass(frozen=True, slots=True)
class ConstraintStats:
    """Grammars and the masks that they give, since the engine's start."""

    num_compiled: int = 0  # grammars; those that were known already are not counted
    compile_seconds: float = 0.0  # on other threads than the engine's
    num_masks: int = 0
    mask_seconds: float = 0.0  # likewise
    wait_seconds: float = 0.0  # that steps waited for masks once their logits were there


@dataclass(frozen=True, slots=True)
class AdapterSpeculation:
    """The guesses of one adapter's tokens, or of several that answer together."""

    digests: tuple[str, ...]  # none: the base model
    names: tuple[str, ...]  # of the same, where they are in a slot; else empty
    num_drafted: int  # tokens, of all tenants
    num_accepted: int
    acceptance: float  # accepted over drafted


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Guessed tokens and what became of them, since the engine's start."""

    most: int = 0  # guesses of a row and step; 0: none are made
    num_drafts: int = 0
    num_drafted: int = 0  # tokens
    num_accepted: int = 0
    accepted_by_place: tuple[int, ...] = ()  # how often the first guess of a draft was accepted, the second, ...
    adapters: tuple[AdapterSpeculation, ...] = ()  # those with the most guesses
    mode: str = "off"  # --speculate: "auto", "off" or a number


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot of the engine; of a fleet, what `fleet_stats.merged` makes of its engines' snapshots."""

    num_running: int
    num_waiting: int
    running_adapters: tuple[str, ...]  # names of adapters resident on the device
    waiting_adapters: tuple[str, ...]
    max_loras: int
    num_blocks: int
    num_free_blocks: int
    block_size: int  # tokens
    num_preemptions: int
    slots: tuple[SlotInfo, ...]
    host_digests: tuple[str, ...]
    loading_digests: tuple[str, ...]
    tiers: dict[str, TierStats] = field(default_factory=dict)
    adapters: dict[str, AdapterCounters] = field(default_factory=dict)
    recent_batches: tuple[BatchInfo, ...] = ()
    num_steps: int = 0
    step_seconds: float = 0.0  # summed over all steps
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # and found there
    batcher: BatcherStats | None = None
    memory: MemoryStats = field(default_factory=MemoryStats)
    swap: SwapStats = field(default_factory=SwapStats)
    num_constrained: int = 0  # running rows whose output obeys a grammar
    num_forced: int = 0  # tokens that were not sampled, as a grammar left no choice
    constraints: ConstraintStats = field(default_factory=ConstraintStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_hung_loads: int = 0  # that ended with LoadHangsError, since start
    steps_by_tokens: tuple[int, ...] = ()  # steps since start: up to each of STEP_TOKENS, then larger ones
    num_step_tokens: int = 0  # in all of them
    num_waiting_tokens: int = 0  # of the prompts of all requests, that are still to be computed
    num_running_tokens: int = 0  # of running rows, that are computed
    replicas: tuple[ReplicaStats, ...] | None = None  # None: the server has one engine, and no fleet
    pid: int | None = None  # of the engine's process; 0: the figures are those of several
    num_replicas_lost: int = 0  # since the server's start; others took their places


class ReplicaState(enum.StrEnum):
    """Where a replica of a fleet is between its start and its end, as one server sees it."""

    STARTING = "starting"  # not asked yet, or not ready yet
    READY = "ready"
    DRAINING = "draining"  # it gets no new request
    REFUSED = "refused"  # it does not belong to this fleet: another model, another version of this program
    LOST = "lost"  # it has ended, or does not answer


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One engine of a fleet, as one server sees it."""

    replica: str  # a random name that no replica before it had
    node: str  # the machine's address
    state: ReplicaState
    reason: str = ""  # for any state but READY, in words
    version: str = ""  # of this program
    fingerprint: str = ""  # ModelSpec.fingerprint of its base model
    age: float = 0.0  # seconds since its start
    num_requests: int = 0  # that this server has sent it and that have not ended
    num_servers: int = 1  # that send it requests, this one among them
    stats: EngineStats | None = None  # None: it has told none yet
