"""The engine's figures: one frozen snapshot, made on the engine's own thread.

The type of each figure says what several engines' become as one's (`core/figures.py`), and under which name
/metrics has it (`server/operation/metrics.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import zip_longest
from typing import Annotated, Any

import msgspec

from lora_serve.core.figures import (
    COUNTS,
    Count,
    EvictionReason,
    LoadTimes,
    MergeBy,
    MergeOwners,
    MetricName,
    Names,
    Seconds,
    TierStats,
    added,
    added_by_place,
)
from lora_serve.core.setting_groups.engine import BatchLimits

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


def _of_last_load(one: AdapterCounters, other: AdapterCounters, name: str) -> Any:
    return getattr(other if other.loads else one, name)


@dataclass(frozen=True, slots=True)
class AdapterCounters:
    """Per adapter digest, since start."""

    # Of several engines the last load and eviction are those of the last one that had one, as no times are kept.

    hits: Mapping[str, int] = field(default_factory=dict)  # requests that found it on the device, by the id they named
    misses: Mapping[str, int] = field(default_factory=dict)  # likewise, that had to wait for it
    loads: int = 0
    evictions: int = 0  # from the device
    load_seconds: Annotated[float, MergeOwners(_of_last_load)] = 0.0  # of the last load, fetch to slot
    eviction_reasons: Mapping[EvictionReason, int] = field(default_factory=dict)  # they add up to `evictions`
    last_eviction: Annotated[EvictionReason | None, MergeBy(lambda _, other: other)] = None
    last_load: Annotated[LoadTimes | None, MergeOwners(_of_last_load)] = None


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
    num_out_of_memory: Count = 0  # steps that the device had no memory for, and that were run in parts
    max_tokens: Annotated[int | None, MergeBy(min)] = (
        None  # of a step, for a while after such a one; None: as configured
    )


@dataclass(frozen=True, slots=True)
class SwapStats:
    """Preemptions by kind, and the KV blocks in host memory."""

    num_swapped: Count = 0  # preemptions whose blocks were moved to host memory
    num_recomputed: Count = 0  # preemptions whose blocks were given up
    num_blocks: int = 0  # that fit into host memory
    num_used: int = 0
    seconds_per_block: Annotated[float, MergeBy(max)] = 0.0  # learned, of one copy


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Steps captured as CUDA graphs, since the engine's start."""

    num_replayed: Annotated[Count, MetricName("lora_serve_graph_steps", "Passes that replayed a CUDA graph.")] = 0
    num_captured: Annotated[Count, MetricName("lora_serve_graph_captures", "CUDA graphs that were captured.")] = 0
    num_failed: Annotated[
        Count, MetricName("lora_serve_graph_captures_failed", "Sizes of steps that could not be captured.")
    ] = 0
    capture_seconds: Annotated[Seconds, MetricName("lora_serve_graph_capture_seconds", "Seconds of captures.")] = 0.0
    compile_seconds: Annotated[Seconds, MetricName("lora_serve_layer_compile_seconds", "Seconds of compiling.")] = 0.0


@dataclass(frozen=True, slots=True)
class ConstraintStats:
    """Grammars and the masks that they give, since the engine's start."""

    # Those that were known already are not counted.
    num_compiled: Annotated[Count, MetricName("lora_serve_grammar_compilations", "Grammars compiled.")] = 0
    # On other threads than the engine's, as the masks are computed.
    compile_seconds: Annotated[
        Seconds, MetricName("lora_serve_grammar_compile_seconds", "Seconds of compiling grammars.")
    ] = 0.0
    num_masks: Annotated[Count, MetricName("lora_serve_grammar_masks", "Masks, one for each token of such a row.")] = 0
    mask_seconds: Annotated[
        Seconds, MetricName("lora_serve_grammar_mask_seconds", "Seconds of computing masks, beside the forward pass.")
    ] = 0.0
    # Once their logits were there.
    wait_seconds: Annotated[
        Seconds,
        MetricName("lora_serve_grammar_wait_seconds", "Seconds that steps waited for masks after the forward pass."),
    ] = 0.0


def _acceptance(one: AdapterSpeculation, other: AdapterSpeculation, _: str) -> float:
    num_accepted, num_drafted = one.num_accepted + other.num_accepted, one.num_drafted + other.num_drafted
    return round(num_accepted / max(1, num_drafted), 3)


def _first_known(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(first or second for first, second in zip_longest(one, other, fillvalue=""))


@dataclass(frozen=True, slots=True)
class AdapterSpeculation:
    """The guesses of one adapter's tokens, or of several that answer together."""

    digests: Annotated[tuple[str, ...], MergeBy(lambda one, _: one)]  # none: the base model
    names: Annotated[tuple[str, ...], MergeBy(_first_known)]  # of the same, where they are in a slot; else empty
    num_drafted: int  # tokens, of all tenants
    num_accepted: int
    acceptance: Annotated[float, MergeOwners(_acceptance)]  # accepted over drafted


def _by_owner(
    one: tuple[AdapterSpeculation, ...], other: tuple[AdapterSpeculation, ...]
) -> tuple[AdapterSpeculation, ...]:
    found = added({guesses.digests: guesses for guesses in one}, {guesses.digests: guesses for guesses in other})
    return tuple(sorted(found.values(), key=lambda guesses: -guesses.num_drafted))


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Guessed tokens and what became of them, since the engine's start."""

    most: Annotated[int, MergeBy(max), COUNTS] = 0  # guesses of a row and step; 0: none are made
    num_drafts: Annotated[Count, MetricName("vllm:spec_decode_num_drafts", "Drafts run.")] = 0
    num_drafted: Annotated[Count, MetricName("vllm:spec_decode_num_draft_tokens", "Guessed tokens run.")] = 0
    num_accepted: Annotated[Count, MetricName("vllm:spec_decode_num_accepted_tokens", "Guessed tokens accepted.")] = 0
    # How often the first guess of a draft was accepted, the second, ...
    accepted_by_place: Annotated[tuple[int, ...], MergeBy(added_by_place), COUNTS] = ()
    adapters: Annotated[tuple[AdapterSpeculation, ...], MergeBy(_by_owner)] = ()  # those with the most guesses
    # --speculate: "auto", "off" or a number.
    mode: Annotated[str, MergeBy(lambda one, other: other if one == "off" else one), COUNTS] = "off"


def _of_latest(one: BatcherStats, other: BatcherStats) -> BatcherStats:
    """The figures of the replica whose first tokens are latest, as the admin's limits are the same for all."""
    latest = max(one, other, key=lambda batcher: batcher.ttft_p95 or 0.0)
    return replace(latest, itl_p95=max((p95 for p95 in (one.itl_p95, other.itl_p95) if p95 is not None), default=None))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot of the engine; of a fleet, what `merged` makes of its engines' snapshots."""

    num_running: Annotated[int, MetricName("vllm:num_requests_running", "Rows in the batch.")] = 0
    num_waiting: Annotated[int, MetricName("vllm:num_requests_waiting", "Sequences that wait.")] = 0
    running_adapters: Names = ()  # names of adapters resident on the device
    waiting_adapters: Names = ()
    max_loras: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    block_size: Annotated[int, MergeBy(max)] = 0  # tokens
    num_preemptions: Annotated[Count, MetricName("vllm:num_preemptions", "Sequences set back to make room.")] = 0
    slots: tuple[SlotInfo, ...] = ()
    host_digests: Names = ()
    loading_digests: Names = ()
    tiers: Annotated[dict[str, TierStats], COUNTS] = field(default_factory=dict)
    adapters: dict[str, AdapterCounters] = field(default_factory=dict)
    recent_batches: tuple[BatchInfo, ...] = ()
    num_steps: Count = 0
    step_seconds: Seconds = 0.0  # of all steps
    # In the prefix cache.
    num_prefix_queries: Annotated[Count, MetricName("vllm:prefix_cache_queries", "Prompt tokens looked up.")] = 0
    num_prefix_hits: Annotated[Count, MetricName("vllm:prefix_cache_hits", "Prompt tokens found.")] = 0
    batcher: Annotated[BatcherStats | None, MergeBy(_of_latest)] = None
    memory: Annotated[MemoryStats, COUNTS] = field(default_factory=MemoryStats)
    swap: Annotated[SwapStats, COUNTS] = field(default_factory=SwapStats)
    num_constrained: Annotated[int, MetricName("lora_serve_grammar_rows", "Rows in the batch that obey a grammar.")] = 0
    num_forced: Annotated[Count, MetricName("lora_serve_grammar_forced_tokens", "Tokens that no step sampled.")] = 0
    constraints: Annotated[ConstraintStats, COUNTS] = field(default_factory=ConstraintStats)
    graphs: Annotated[GraphStats, COUNTS] = field(default_factory=GraphStats)
    speculation: Annotated[SpeculationStats, COUNTS] = field(default_factory=SpeculationStats)
    # That ended with LoadHangsError.
    num_hung_loads: Annotated[
        Count, MetricName("lora_serve_adapter_loads_hung", "Loads given up as the store hangs.")
    ] = 0
    # Up to each of STEP_TOKENS, then larger ones.
    steps_by_tokens: Annotated[tuple[int, ...], MergeBy(added_by_place), COUNTS] = ()
    num_step_tokens: Count = 0  # in all of them
    num_waiting_tokens: int = 0  # of the prompts of all requests, that are still to be computed
    num_running_tokens: int = 0  # of running rows, that are computed
    replicas: tuple[ReplicaStats, ...] | None = None  # None: the server has one engine, and no fleet
    pid: Annotated[int | None, MergeBy(lambda *_: 0)] = None  # of the engine's process; 0: of several
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
    stats: EngineStats | None = None  # None: it has sent none yet


EMPTY = EngineStats()


def merged(replicas: Sequence[ReplicaStats], lost: EngineStats = EMPTY, num_lost: int = 0) -> EngineStats:
    """The fleet's figures: of all replicas that have sent theirs, in whatever state they are. Slots and blocks are
    those of all, the limits of the batcher those of one engine.

    `lost`: the counters (`counters_of`) of replicas that are no more, so that no counter ever falls.
    """
    known = [_named(replica.stats, replica.replica) for replica in replicas if replica.stats is not None]
    whole: EngineStats = reduce(added, [*known, lost], EMPTY)
    return replace(whole, replicas=tuple(replicas), num_replicas_lost=num_lost)


def _named(stats: EngineStats, replica: str) -> EngineStats:
    return replace(stats, slots=tuple(replace(slot, replica=replica) for slot in stats.slots))


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """One look at a replica. Digests are those of adapter versions; tokens are counted over all gateways' requests."""

    replica: str  # a random name that no replica before it had
    made_at: float  # seconds of the replica's `time.monotonic()`: orders its reports, says nothing beside another's
    device: tuple[str, ...] = ()  # adapters in slots
    host: tuple[str, ...] = ()  # in host memory, some of them in slots too
    loading: tuple[str, ...] = ()  # on their way there
    max_loras: int = 0  # slots
    num_running: int = 0  # requests
    num_waiting: int = 0
    waiting_tokens: int = 0  # of prompts, that are still to be computed
    running_tokens: int = 0  # of running rows, that are computed: what each step reads again
    num_blocks: int = 0  # of KV
    num_free_blocks: int = 0
    load_tokens: int = 0  # tokens that it computes in the time that the load of an adapter takes; 0: not known yet
    prefix_roots: tuple[int, ...] = ()  # of prompts that it has computed lately: `routing/fleet_view.py`
    is_host_full: bool = False  # one more adapter there, and another has to leave host memory


def report_of(replica: str, made_at: float, stats: EngineStats, prefix_roots: Sequence[int] = ()) -> ReplicaReport:
    """The report of a replica whose engine has these figures."""
    return ReplicaReport(
        replica=replica,
        made_at=made_at,
        device=tuple(slot.digest for slot in stats.slots),
        host=stats.host_digests,
        loading=stats.loading_digests,
        max_loras=stats.max_loras,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        waiting_tokens=stats.num_waiting_tokens,
        running_tokens=stats.num_running_tokens,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        load_tokens=_load_tokens(stats),
        prefix_roots=tuple(prefix_roots),
        is_host_full=_is_host_full(stats),
    )


def _load_tokens(stats: EngineStats) -> int:
    """Seconds of a load into host memory, the mean since the start, over those of a prompt's token."""
    host = stats.tiers.get("host")
    if host is None or not host.loads or stats.batcher is None or not stats.batcher.cost.get("token"):
        return 0
    return round(host.load_seconds / host.loads / stats.batcher.cost["token"])


def _is_host_full(stats: EngineStats) -> bool:
    """True if an adapter as large as the mean of those there would not fit in."""
    host = stats.tiers.get("host")
    if host is None or not host.num_bytes or not host.num_items or not host.budget_bytes:
        return False
    return host.num_bytes + host.num_bytes / host.num_items > host.budget_bytes
