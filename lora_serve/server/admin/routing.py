"""PUT /admin/adapters/{id}/route, POST .../rollback, and /admin/aliases: the version that a name means."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import Canary
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import ConflictError
from lora_serve.server.admin.adapters import card_response
from lora_serve.server.admin.permissions import own_name_in
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import AliasFields, RouteFields
from lora_serve.server.services import SERVICES


async def set_route(request: web.Request) -> web.StreamResponse:
    """Choose an adapter's default version and its canary.

    `version`: the default (left out: as it is); `canary`: {"version", "percent"}, or none.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    fields = check_fields(RouteFields, await read_json(request))
    canary = None if fields.canary is None else Canary(fields.canary.version, fields.canary.percent)
    await services.edit(lambda: services.catalog.set_route(name, fields.version, canary), f"routing {name}")
    return await card_response(request, name)


async def roll_back(request: web.Request) -> web.StreamResponse:
    """End an adapter's canary, or go back to the version before.

    409 if there is neither.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    await services.edit(lambda: services.catalog.roll_back(name), f"rolling back {name}")
    return await card_response(request, name)


async def list_aliases(request: web.Request) -> web.StreamResponse:
    """List aliases."""
    aliases = request.app[SERVICES].catalog.snapshot.aliases

    def made() -> dict[str, Any]:
        return {"object": "list", "data": [{"alias": alias, "target": aliases[alias]} for alias in sorted(aliases)]}

    return await json_answer(request, made, 5 * len(aliases))


async def set_alias(request: web.Request) -> web.StreamResponse:
    """Set an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    target = check_fields(AliasFields, await read_json(request)).target
    if check_adapter_id(alias) == services.base_name:
        raise ConflictError(f"`{alias}` is the base model's name.")
    await services.edit(lambda: services.catalog.set_alias(alias, target), f"naming {alias}")
    return web.json_response({"alias": alias, "target": target})


async def remove_alias(request: web.Request) -> web.StreamResponse:
    """Remove an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    await services.edit(lambda: services.catalog.remove_alias(alias), f"removing {alias}")
    return web.json_response({"alias": alias, "deleted": True})
