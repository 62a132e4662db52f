"""DELETE /admin/adapters/{id}[?version=]"""

from __future__ import annotations

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.admin.ownership import own_name_in
from lora_serve.server.admin.removal import remove_adapter
from lora_serve.server.services import SERVICES


async def delete_adapter(request: web.Request) -> web.StreamResponse:
    """404 for new requests from now on; running ones finish."""
    version = _version(request.query.get("version"))
    name = own_name_in(request)
    await remove_adapter(request.app[SERVICES], name, version)
    return web.json_response({"id": name, "object": "adapter", "version": version, "deleted": True})


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidRequestError("`version` must be a number.", param="version")
    return int(text)
