"""/admin/engine: the inside, the limits, changed without a restart, the health; /admin/fleet: where an adapter is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_type_hints

from aiohttp import web
from msgspec import Struct, defstruct

from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.core.figures import TierStats
from lora_serve.core.messages import Resize, Tune
from lora_serve.core.stats import EMPTY, BatcherStats, EngineStats, ReplicaState, ReplicaStats, SlotInfo
from lora_serve.server.admin.answers import AdapterPlace
from lora_serve.server.admin.card import places_of
from lora_serve.server.admin.protocol import FleetQuery, LimitFields
from lora_serve.server.answers import json_response
from lora_serve.server.json_body import check_fields, check_query, read_json
from lora_serve.server.lifecycle import EngineRestart, ServerState, WarmUpStage
from lora_serve.server.services import SERVICES, Services, replicas_of

Ms = TypeVar("Ms", float, float | None)
_DIGEST = "sha256:"


async def get_engine(request: web.Request) -> web.StreamResponse:
    """Show the engine's state.

    Slots, tiers, KV blocks, queue, the batcher's limits, the composition of the last batches; of a fleet the sums, with
    the limits of one replica.
    """
    services = request.app[SERVICES]
    stats = await services.client.stats()
    tiers = {**stats.tiers, **await services.store_tiers()}
    own = {"tiers": tiers, "max_loras": _max_loras(stats), "batcher": batcher_card(stats.batcher)}
    return json_response(EngineCard(**_named(EngineCard, stats) | own))


async def put_engine(request: web.Request) -> web.StreamResponse:
    """Change the engine while it runs.

    Answers with GET /admin/engine's body. No running row is cut off: its slot goes when the row ends.
    """
    services = request.app[SERVICES]
    body = await read_json(request, keep_null=True)
    if "speculate" in body:
        raise InvalidRequestError("`speculate` cannot be changed while the server runs.", param="speculate")
    off = {name: 0 for name in Tune.MAY_BE_OFF if name in body and body[name] is None}
    fields = check_fields(LimitFields, body | off)
    resize, tune = Resize(**_named(Resize, fields)), Tune(**_named(Tune, fields))
    if (resize, tune) == (Resize(), Tune()):
        raise InvalidRequestError(f"Give at least one of {', '.join(LimitFields.model_fields)}.")
    await services.background.complete(_change(services, resize, tune), "changing limits")
    return await get_engine(request)


async def _change(services: Services, resize: Resize, tune: Tune) -> None:
    """All or none: a `tune` that the engine would refuse is refused before `resize` is done."""
    if tune != Tune() and (batcher := (await services.client.stats()).batcher) is not None:
        tune.applied_to(batcher.limits)
    if resize != Resize():
        await services.client.adapters(resize)  # first, as the engine alone may refuse
        services.limits.change(resize)
        services.registry.set_host_bytes(services.adapter_limits.adapter_host_memory)
    if tune != Tune():
        await services.client.adapters(tune)


def _max_loras(stats: EngineStats) -> int:
    """The slots of one engine, which is what PUT sets."""
    each = [replica.stats.max_loras for replica in stats.replicas or () if replica.stats is not None]
    return max(each, default=stats.max_loras)


def batcher_card(stats: BatcherStats | None) -> BatcherCard | None:
    """The batcher's part of the answer, under the names that PUT takes; None: the engine does not tell. Times in ms,
    coefficients in microseconds.
    """
    if stats is None:
        return None
    limits = stats.limits
    return BatcherCard(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        _ms(limits.batch_wait),
        preferred_batch_size=limits.preferred_batch_size,
        latency_target_ms=_ms(limits.ttft_target),
        inter_token_target_ms=_ms(limits.itl_target),
        in_force=BatcherLimits(stats.max_rows, stats.max_tokens, _ms(stats.window)),
        measured={"ttft_p95_ms": _ms(stats.ttft_p95), "inter_token_p95_ms": _ms(stats.itl_p95)},
        step_cost_us={name: round(1e6 * seconds, 4) for name, seconds in stats.cost.items()},
        step_cost_error=None if stats.cost_error is None else round(stats.cost_error, 3),
        reason=stats.reason,
    )


def _ms(seconds: Ms) -> Ms:
    """Milliseconds, where there are seconds."""
    return None if seconds is None else round(1000 * seconds, 3)


async def get_engine_health(request: web.Request) -> web.StreamResponse:
    """Show how the engine came up, and what could stop it.

    The last warm-up part by part, restarts with their reasons, the queue and its limits, the store and Redis.
    """
    services = request.app[SERVICES]
    history, lifecycle, gate = services.history, services.lifecycle, services.client.gate
    limits = gate.limits
    return json_response(
        EngineHealth(
            state=lifecycle.state,
            reason=lifecycle.reason,
            started=history.started,
            ready_since=history.ready_since,
            warm_up=history.stages,
            num_restarts=services.metrics.num_engine_restarts,
            restarts=list(reversed(history.restarts)),
            queue=QueueCard(
                num_requests=gate.num_requests,
                num_tokens=gate.num_tokens,
                max_requests=limits.max_queue,
                max_tokens=limits.max_queue_tokens,
                max_tenant_requests=limits.max_tenant_queue,
                max_tenant_tokens=limits.max_tenant_queue_tokens,
            ),
            adapter_limits=AdapterLimits(**_named(Resize, services.adapter_limits)),
            store_problem=services.store_problem,
            redis=redis_card(services),
        )
    )


def redis_card(services: Services) -> RedisCard | None:
    """The shared journals as this server last met them; None: there is no Redis."""
    if services.adapter_config.redis_url is None:
        return None
    return RedisCard(_journal(services.catalog.ledger), _journal(services.keys.directory.ledger))


def _journal(ledger: Ledger[Any]) -> JournalCard:
    return JournalCard(ledger.is_away, round(ledger.seconds_away, 1), ledger.num_losses)


def _named(kind: type[Struct], values: object) -> dict[str, Any]:
    """The values of the fields of a card, or of a command."""
    return {name: getattr(values, name) for name in kind.__struct_fields__}


async def get_fleet(request: web.Request) -> web.StreamResponse:
    """Show the engines behind this server.

    State, load and adapters of each; with `adapter`, the ones that hold it.
    """
    services, wanted = request.app[SERVICES], check_query(FleetQuery, request).adapter
    stats = await services.engine_stats()
    replicas = replicas_of(services, stats)
    num_lost = 0 if stats is None else stats.num_replicas_lost
    num_restarts = services.metrics.num_engine_restarts
    in_fleet = stats is not None and stats.replicas is not None
    return json_response(
        Fleet(
            data=[_replica_card(replica) for replica in replicas],
            replicas=[_in_short(replica, 0 if in_fleet else num_restarts) for replica in replicas],
            router=RouterCard(services.config.router) if in_fleet else None,
            restarts=num_restarts + num_lost,
            adapter=None if wanted is None else _adapter_places(services.catalog.snapshot, wanted, replicas),
        )
    )


class BatcherLimits(Struct):
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


EngineCard = defstruct(
    "EngineCard",
    [
        (name, BatcherCard | None if name == "batcher" else kind)
        for name, kind in get_type_hints(EngineStats).items()
        if name != "replicas"  # GET /admin/fleet
    ],
    module=__name__,
    namespace={"__doc__": "`core/stats.py: EngineStats`, with the batcher under the names that PUT takes."},
)


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


def _replica_card(replica: ReplicaStats) -> ReplicaCard:
    """One engine; the figures are 0 until it has told some."""
    stats, names = replica.stats or EMPTY, ReplicaCard.__struct_fields__
    same = {name: getattr(one, name) for one in (replica, stats) for name in names if hasattr(one, name)}
    own = {
        "id": replica.replica,
        "base_fingerprint": replica.fingerprint,
        "age_seconds": round(replica.age, 1),
        "slots": [replace(slot, replica=replica.replica) for slot in stats.slots],
        "num_host_adapters": len(stats.host_digests),
    }
    return ReplicaCard(**same | own)


def _in_short(replica: ReplicaStats, num_restarts: int) -> ReplicaInShort:
    """`num_restarts`: 0 in a fleet, where a new engine has a new id."""
    stats = replica.stats or EMPTY
    resident = [slot.digest for slot in stats.slots]
    load = stats.num_running, stats.num_waiting
    return ReplicaInShort(replica.replica, replica.node, replica.state, resident, *load, num_restarts)


def _adapter_places(snapshot: Snapshot, wanted: str, replicas: tuple[ReplicaStats, ...]) -> AdapterPlaces:
    """Who holds each version that an id or a digest means. Raises AdapterNotFoundError."""
    is_digest = wanted.startswith(_DIGEST)
    entry = None if is_digest else snapshot.entries.get(wanted)
    if entry is None and not (is_digest and wanted in snapshot.digests):
        raise AdapterNotFoundError(wanted)
    versions: list[tuple[str, int | None]] = [(wanted, None)]
    if entry is not None:
        versions = [(one.digest, one.version) for one in entry.versions]
    places = [VersionPlaces(number, digest, list(places_of(digest, replicas))) for digest, number in versions]
    return AdapterPlaces(wanted, places)
