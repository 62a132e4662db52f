"""GET /admin/engine/health: the engine's lives, its queue's limits, and what the server leans on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.core.config import AdapterConfig
from lora_serve.server.services import SERVICES, Services


async def get_engine_health(request: web.Request) -> web.StreamResponse:
    """Show how the engine came up, and what could stop it.

    The last warm-up part by part, restarts with their reasons, the queue and its limits, the store and Redis.
    """
    services = request.app[SERVICES]
    history, lifecycle, gate = services.history, services.lifecycle, services.client.gate
    return web.json_response(
        {
            "object": "engine_health",
            "state": lifecycle.state.value,
            "reason": lifecycle.reason,
            "started": history.started,
            "ready_since": history.ready_since,
            "warm_up": [asdict(stage) for stage in history.stages],
            "num_restarts": services.metrics.num_engine_restarts,
            "restarts": [asdict(restart) for restart in reversed(history.restarts)],
            "queue": {"num_requests": gate.num_requests, "num_tokens": gate.num_tokens, **asdict(gate.limits)},
            "adapter_limits": limits_card(services.adapter_limits),
            "store_problem": services.store_problem,
            "redis": redis_card(services),
        }
    )


def limits_card(config: AdapterConfig) -> dict[str, int | None]:
    """The tiers' limits, under the names that PUT /admin/engine takes."""
    return {
        "max_loras": config.max_loras,
        "adapter_memory": config.device_bytes,
        "adapter_host_memory": config.host_bytes,
        "max_cpu_loras": config.max_cpu_loras,
    }


def redis_card(services: Services) -> dict[str, Any] | None:
    """The shared journals as this server last met them; None: there is no Redis."""
    if services.adapter_config.redis_url is None:
        return None
    return {"registry": _journal(services.catalog.ledger), "tenants": _journal(services.keys.directory.ledger)}


def _journal(ledger: Ledger[Any]) -> dict[str, Any]:
    away = round(ledger.seconds_away, 1)
    return {"is_away": ledger.is_away, "seconds_away": away, "num_losses": ledger.num_losses}
