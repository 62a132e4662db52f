"""DELETE /admin/adapters/{id}[?version=]"""

from __future__ import annotations

from aiohttp import web

from lora_serve.server.admin.ownership import own_name_in
from lora_serve.server.admin.removal import remove_adapter
from lora_serve.server.bodies.json_body import check_query
from lora_serve.server.schemas.queries import DeletionQuery
from lora_serve.server.services import SERVICES


async def delete_adapter(request: web.Request) -> web.StreamResponse:
    """404 for new requests from now on; running ones finish."""
    version = check_query(DeletionQuery, request).version
    name = own_name_in(request)
    await remove_adapter(request.app[SERVICES], name, version)
    return web.json_response({"id": name, "object": "adapter", "version": version, "deleted": True})
