"""GET /admin/adapters, GET /admin/adapters/{id}, GET /admin/engine"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.adapter import AdapterState
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.stats import EngineStats
from lora_serve.server.admin.batcher import batcher_card
from lora_serve.server.admin.card import adapter_card, state_of
from lora_serve.server.services import SERVICES, Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
PAGE = 1000  # entries looked at between two looks at their state


async def list_adapters(request: web.Request) -> web.StreamResponse:
    """?tenant=&state=&limit=&after= ; by name, with `has_more` and `last_id` for the next page."""
    services = request.app[SERVICES]
    limit = page_limit(request.query.get("limit"))
    state = _state(request.query.get("state"))
    stats = await engine_stats(services)
    found = _matching(services, request.query.get("tenant"), request.query.get("after"), state, stats, limit + 1)
    page = found[:limit]
    return web.json_response(
        {
            "object": "list",
            "data": [_card(services, entry, stats) for entry in page],
            "has_more": len(found) > limit,
            "last_id": page[-1].name if page else None,
        }
    )


async def get_adapter(request: web.Request) -> web.StreamResponse:
    return await card_response(request.app[SERVICES], request.match_info["id"])


async def get_engine(request: web.Request) -> web.StreamResponse:
    """Slots, tiers, KV blocks, queue, the batcher's limits, the composition of the last batches."""
    services = request.app[SERVICES]
    stats = await services.client.stats()
    shown = asdict(replace(stats, tiers={**stats.tiers, **await services.store_tiers()}))
    return web.json_response(shown | {"batcher": batcher_card(stats.batcher)})


async def card_response(services: Services, name: str, status: int = 200) -> web.Response:
    """The card of `name`. Raises AdapterNotFoundError."""
    entry = services.catalog.entry(name)
    return web.json_response(await card_of(services, entry), status=status)


async def card_of(services: Services, entry: CatalogEntry) -> dict[str, Any]:
    """With the engine's figures of this moment."""
    return _card(services, entry, await engine_stats(services))


def _card(services: Services, entry: CatalogEntry, stats: EngineStats | None) -> dict[str, Any]:
    return adapter_card(entry, stats, services.places_of, services.catalog.snapshot.aliases_of(entry.name))


async def engine_stats(services: Services) -> EngineStats | None:
    """None if the engine cannot answer: what the catalog knows is shown all the same."""
    try:
        return await services.client.stats()
    except LoraServeError:
        return None


def _matching(
    services: Services,
    tenant: str | None,
    after: str | None,
    state: AdapterState | None,
    stats: EngineStats | None,
    count: int,
) -> list[CatalogEntry]:
    found: list[CatalogEntry] = []
    while len(found) < count:
        page = services.catalog.entries(tenant, after, PAGE)
        found += [entry for entry in page if state is None or state_of(entry.default.digest, stats) is state]
        if len(page) < PAGE:
            break
        after = page[-1].name
    return found[:count]


def page_limit(text: str | None) -> int:
    """`limit` of a list. Raises InvalidRequestError."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequestError(f"`limit` must be a number from 1 to {MAX_LIMIT}.", param="limit")
    return int(text)


def _state(text: str | None) -> AdapterState | None:
    if text is None:
        return None
    if text not in set(AdapterState):
        raise InvalidRequestError(f"`state` must be one of {', '.join(AdapterState)}.", param="state")
    return AdapterState(text)
