"""GET /v1/models, GET and DELETE /v1/models/{id}"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.adapter import AdapterRef, split_name
from lora_serve.core.errors import AdapterNotFoundError
from lora_serve.server.admin.adapters import remove_adapter
from lora_serve.server.admin.permissions import owned_entry
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.resolve import resolver_for
from lora_serve.server.services import SERVICES, Services

_CARD_VALUES = 20  # what one card costs, as values of an answer
STARTED = int(time.time())  # `created` of the base model


async def list_models(request: web.Request) -> web.StreamResponse:
    """The base model first, then the adapters that the caller may see, by name."""
    services = request.app[SERVICES]
    caller = request[CONTEXT].known_caller
    snapshot = services.catalog.snapshot

    def made() -> dict[str, Any]:
        visible = (
            entry for entry in map(snapshot.entries.__getitem__, snapshot.names) if entry.is_visible_to(caller.scope)
        )
        base = [_base_card(services)] if caller.may_use_base else []
        data = [*base, *(_adapter_card(services, entry, entry.name, entry.ref()) for entry in visible)]
        return {"object": "list", "data": data}

    return await json_answer(request, made, _CARD_VALUES * len(snapshot.names))


async def get_model(request: web.Request) -> web.StreamResponse:
    services, name = request.app[SERVICES], request.match_info["id"]
    found = resolver_for(request).find(name)
    if found is None:
        return web.json_response(_base_card(services))
    return web.json_response(_adapter_card(services, found.entry, name, found.ref))


async def delete_model(request: web.Request) -> web.StreamResponse:
    """OpenAI's form of the admin's DELETE; `id@3` deletes one version."""
    services, name = request.app[SERVICES], request.match_info["id"]
    caller = request[CONTEXT].known_caller
    adapter_id, selector = split_name(name)
    try:
        entry = owned_entry(services.catalog.snapshot, adapter_id, caller)
        found = None if selector is None else services.catalog.resolve(f"{entry.name}@{selector}", caller.scope)
        await remove_adapter(services, entry.name, None if found is None else found.version.version)
    except AdapterNotFoundError:
        raise AdapterNotFoundError(name) from None
    return web.json_response({"id": name, "object": "model", "deleted": True})


def _base_card(services: Services) -> dict[str, Any]:
    return _card(services.base_name, STARTED, "lora_serve", services.base_name, None, services)


def _adapter_card(services: Services, entry: CatalogEntry, name: str, version: AdapterRef) -> dict[str, Any]:
    """`root` is the version that the id means, by its content."""
    root = f"{entry.name}@{version.digest}"
    return _card(name, int(entry.created), entry.tenant, root, services.base_name, services)


def _card(name: str, created: int, owner: str, root: str, parent: str | None, services: Services) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "root": root,
        "parent": parent,
        "max_model_len": services.spec.max_model_len,
        "permission": [],
    }
