"""GET /admin/adapters, GET /admin/adapters/{id}, GET /admin/engine"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.errors import LoraServeError
from lora_serve.core.stats import EngineStats
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.batcher import batcher_card
from lora_serve.server.admin.card import adapter_card, state_of, tenant_card
from lora_serve.server.admin.ownership import entry_for
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_query
from lora_serve.server.context import CONTEXT, caller_of
from lora_serve.server.schemas.queries import AdaptersQuery
from lora_serve.server.services import SERVICES, Services

_CARD_VALUES = 100  # what one card costs, as values of an answer
PAGE = 1000  # entries looked at between two looks at their state


async def list_adapters(request: web.Request) -> web.StreamResponse:
    """?tenant=&state=&limit=&after= ; by name, with `has_more` and `last_id` for the next page."""
    services, caller, query = request.app[SERVICES], caller_of(request[CONTEXT]), check_query(AdaptersQuery, request)
    stats = await _stats_for(services, caller)

    def made() -> dict[str, Any]:
        found = _matching(services, query, caller.scope, stats, query.limit + 1)
        page = found[: query.limit]
        return {
            "object": "list",
            "data": [_card(services, entry, stats, caller) for entry in page],
            "has_more": len(found) > query.limit,
            "last_id": page[-1].name if page else None,
        }

    return await json_answer(request, made, _CARD_VALUES * len(services.catalog.snapshot.names))


async def get_adapter(request: web.Request) -> web.StreamResponse:
    return await card_response(request, request.match_info["id"])


async def get_engine(request: web.Request) -> web.StreamResponse:
    """Slots, tiers, KV blocks, queue, the batcher's limits, the composition of the last batches."""
    services = request.app[SERVICES]
    stats = await services.client.stats()
    shown = asdict(replace(stats, tiers={**stats.tiers, **await services.store_tiers()}))
    return web.json_response(shown | {"batcher": batcher_card(stats.batcher)})


async def card_response(request: web.Request, name: str) -> web.Response:
    """The card of what `name` means for the caller. Raises AdapterNotFoundError."""
    services, caller = request.app[SERVICES], caller_of(request[CONTEXT])
    entry = entry_for(services.catalog.snapshot, name, caller)
    return web.json_response(await card_of(services, entry, caller))


async def card_of(services: Services, entry: CatalogEntry, caller: Caller) -> dict[str, Any]:
    """With the engine's figures of this moment, for whoever sees all."""
    return _card(services, entry, await _stats_for(services, caller), caller)


def _card(services: Services, entry: CatalogEntry, stats: EngineStats | None, caller: Caller) -> dict[str, Any]:
    aliases = services.catalog.snapshot.aliases_of(entry.name)
    if caller.scope is not None:
        return tenant_card(entry, caller.scope, aliases)
    return adapter_card(entry, stats, services.places_of, aliases)


async def _stats_for(services: Services, caller: Caller) -> EngineStats | None:
    return await engine_stats(services) if caller.sees_all else None


async def engine_stats(services: Services) -> EngineStats | None:
    """None if the engine cannot answer: what the catalog knows is shown all the same."""
    try:
        return await services.client.stats()
    except LoraServeError:
        return None


def _matching(
    services: Services, query: AdaptersQuery, seen_by: str | None, stats: EngineStats | None, count: int
) -> list[CatalogEntry]:
    found: list[CatalogEntry] = []
    state, after = query.state, query.after
    while len(found) < count:
        page = services.catalog.entries(query.tenant, after, PAGE, seen_by)
        found += [entry for entry in page if state is None or state_of(entry.default.digest, stats) is state]
        if len(page) < PAGE:
            break
        after = page[-1].name
    return found[:count]
