"""PUT /admin/adapters/{id}/sharing: which other tenants may use an adapter."""

from __future__ import annotations

from aiohttp import web

from lora_serve.server.admin.listing import card_response
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.schemas.tenants import SharingFields
from lora_serve.server.services import SERVICES


async def set_sharing(request: web.Request) -> web.StreamResponse:
    """With those that are named, and no others. Whether there are tenants of these names is not looked at."""
    services, name = request.app[SERVICES], request.match_info["id"]
    shared_with = check_fields(SharingFields, await read_json(request)).shared_with
    await services.edit(lambda: services.registry.set_sharing(name, shared_with), f"sharing {name}")
    return await card_response(request, name)
