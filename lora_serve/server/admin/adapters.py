"""/admin/adapters and /admin/adapters/{id}: list, show, share, delete."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.stats import EngineStats
from lora_serve.core.tenant import EVERYBODY, Caller, check_tenant_name
from lora_serve.server.admin.card import adapter_card, state_of, tenant_card
from lora_serve.server.admin.permissions import entry_for, own_name_in
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields, check_query, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.defaults import known_defaults
from lora_serve.server.schemas.admin import SharingFields
from lora_serve.server.schemas.queries import AdaptersQuery, DeletionQuery
from lora_serve.server.services import SERVICES, Services

_CARD_VALUES = 100  # the size of a card, as values of an answer
PAGE = 1000  # catalog entries whose state is looked at in one go


async def list_adapters(request: web.Request) -> web.StreamResponse:
    """List adapters.

    By name, with `has_more` and `last_id` for the next page.
    """
    services, caller, query = request.app[SERVICES], request[CONTEXT].known_caller, check_query(AdaptersQuery, request)
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
    """Show an adapter."""
    return await card_response(request, request.match_info["id"])


async def set_sharing(request: web.Request) -> web.StreamResponse:
    """Share an adapter with the named tenants and no others."""
    services, name = request.app[SERVICES], request.match_info["id"]
    shared_with = check_fields(SharingFields, await read_json(request)).shared_with
    _check_tenants(services, shared_with)
    await services.edit(lambda: services.catalog.set_sharing(name, shared_with), f"sharing {name}")
    return await card_response(request, name)


def _check_tenants(services: Services, names: list[str]) -> None:
    """Raises InvalidRequestError for a name that is well-formed and no tenant's: a slip of the pen would share with
    nobody, or with whoever is made a tenant of that name later.
    """
    tenants = services.keys.directory.snapshot.tenants
    unknown = [name for name in names if name != EVERYBODY and check_tenant_name(name, "shared_with") not in tenants]
    if unknown:
        raise InvalidRequestError(
            f"There is no tenant `{unknown[0]}` to share with: make it first (POST /admin/tenants).",
            param="shared_with",
        )


async def delete_adapter(request: web.Request) -> web.StreamResponse:
    """Delete an adapter or one of its versions.

    New requests get a 404 from now on, running ones finish.
    """
    version = check_query(DeletionQuery, request).version
    name = own_name_in(request)
    await remove_adapter(request.app[SERVICES], name, version)
    return web.json_response({"id": name, "object": "adapter", "version": version, "deleted": True})


async def remove_adapter(services: Services, name: str, version: int | None) -> None:
    """Unregister an adapter, or one version; durable on return. The reconciler frees the bytes once no running request
    holds them. Raises AdapterNotFoundError, AdapterUnavailableError.
    """
    await services.edit(lambda: services.registry.delete(name, version), f"deleting {name}")


async def card_response(request: web.Request, name: str) -> web.Response:
    """The card of the adapter that `name` means for the caller. Raises AdapterNotFoundError."""
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    entry = entry_for(services.catalog.snapshot, name, caller)
    return web.json_response(await card_of(services, entry, caller))


async def card_of(services: Services, entry: CatalogEntry, caller: Caller) -> dict[str, Any]:
    """The adapter's card, with the engine's figures of this moment for a caller who sees all."""
    return _card(services, entry, await _stats_for(services, caller), caller)


def _card(services: Services, entry: CatalogEntry, stats: EngineStats | None, caller: Caller) -> dict[str, Any]:
    aliases = tuple(services.catalog.snapshot.aliases_of(entry.name))
    defaults = known_defaults(entry.metadata, services.config.requests).card()
    rule = services.adapter_config.chat_templates
    if caller.scope is not None:
        return tenant_card(entry, caller.scope, aliases, defaults, rule)
    return adapter_card(entry, stats, services.places_of, aliases, defaults, rule)


async def _stats_for(services: Services, caller: Caller) -> EngineStats | None:
    """None: the caller may not see the engine's figures, or the engine cannot answer and the catalog has to do."""
    try:
        return await services.client.stats() if caller.sees_all else None
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
