"""GET and PUT /admin/engine: the engine's inside, and its limits, changed without a restart; GET /admin/engine/health:
its lives, its queue's limits, and what the server leans on.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import Resize, Tune
from lora_serve.core.stats import BatcherStats, EngineStats
from lora_serve.server.answers.json_answer import json_response
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import LimitFields
from lora_serve.server.schemas.answers.admin import AdapterLimits, EngineHealth, JournalCard, QueueCard, RedisCard
from lora_serve.server.services import SERVICES, Services


async def get_engine(request: web.Request) -> web.StreamResponse:
    """Show the engine's state.

    Slots, tiers, KV blocks, queue, the batcher's limits, the composition of the last batches; of a fleet the sums, with
    the limits of one replica.
    """
    services = request.app[SERVICES]
    stats = await services.client.stats()
    tiers = {**stats.tiers, **await services.store_tiers()}
    shown = asdict(replace(stats, tiers=tiers, max_loras=_max_loras(stats), replicas=None))
    del shown["replicas"]  # GET /admin/fleet
    return web.json_response(shown | {"batcher": batcher_card(stats.batcher)})


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


def batcher_card(stats: BatcherStats | None) -> dict[str, Any] | None:
    """The batcher's part of the answer, under the names that PUT takes; None: the engine does not tell. Times in ms,
    coefficients in microseconds.
    """
    if stats is None:
        return None
    limits = stats.limits
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "batch_wait_ms": _ms(limits.batch_wait),
        "preferred_batch_size": limits.preferred_batch_size,
        "latency_target_ms": _ms(limits.ttft_target),
        "inter_token_target_ms": _ms(limits.itl_target),
        "in_force": {
            "max_num_seqs": stats.max_rows,
            "max_num_batched_tokens": stats.max_tokens,
            "batch_wait_ms": _ms(stats.window),
        },
        "measured": {"ttft_p95_ms": _ms(stats.ttft_p95), "inter_token_p95_ms": _ms(stats.itl_p95)},
        "step_cost_us": {name: round(1e6 * seconds, 4) for name, seconds in stats.cost.items()},
        "step_cost_error": None if stats.cost_error is None else round(stats.cost_error, 3),
        "reason": stats.reason,
    }


def _ms(seconds: float | None) -> float | None:
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


def _named(command: type[Resize | Tune], limits: object) -> dict[str, Any]:
    """The values of a command's fields, which are settings."""
    return {name: getattr(limits, name) for name in command.__struct_fields__}


def redis_card(services: Services) -> RedisCard | None:
    """The shared journals as this server last met them; None: there is no Redis."""
    if services.adapter_config.redis_url is None:
        return None
    return RedisCard(_journal(services.catalog.ledger), _journal(services.keys.directory.ledger))


def _journal(ledger: Ledger[Any]) -> JournalCard:
    return JournalCard(ledger.is_away, round(ledger.seconds_away, 1), ledger.num_losses)
