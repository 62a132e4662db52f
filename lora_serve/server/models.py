"""GET /v1/models, GET and DELETE /v1/models/{id}"""

from __future__ import annotations

import time
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from lora_serve.adapters.catalog.entry import FOLDER, CatalogEntry, shown_source
from lora_serve.core.adapter import AdapterRef, split_name
from lora_serve.core.errors import AdapterNotFoundError
from lora_serve.core.setting_groups.model import name_of_model
from lora_serve.core.tenant import Caller, Role
from lora_serve.server.admin.adapters import remove_adapter
from lora_serve.server.admin.card import owned_entry
from lora_serve.server.answers import json_answer, json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.resolve import resolver_for
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.authenticator import is_loopback

_CARD_VALUES = 20  # what one card costs, as values of an answer
STARTED = int(time.time())  # `created` of the base model


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    digest: str | None
    max_model_len: int
    permission: list[Any] = []


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class DeletedModel(Struct):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


async def list_models(request: web.Request) -> web.StreamResponse:
    """List the base model, then the adapters that the caller may see, by name."""
    services = request.app[SERVICES]
    caller = request[CONTEXT].known_caller
    snapshot = services.catalog.snapshot

    def made() -> ModelList:
        visible = (
            entry for entry in map(snapshot.entries.__getitem__, snapshot.names) if entry.is_visible_to(caller.scope)
        )
        base = [_base_card(services, caller)] if caller.may_use_base else []
        cards = (_adapter_card(services, caller, entry, entry.name, entry.ref()) for entry in visible)
        return ModelList(data=[*base, *cards])

    return await json_answer(request, made, _CARD_VALUES * len(snapshot.names))


async def get_model(request: web.Request) -> web.StreamResponse:
    """Show a model or an adapter."""
    services, name = request.app[SERVICES], request.match_info["id"]
    found, caller = resolver_for(request).find(name), request[CONTEXT].known_caller
    if found is None:
        return json_response(_base_card(services, caller))
    return json_response(_adapter_card(services, caller, found.entry, name, found.ref))


async def delete_model(request: web.Request) -> web.StreamResponse:
    """Delete an adapter, in OpenAI's form.

    `id@3` deletes one version.
    """
    services, name = request.app[SERVICES], request.match_info["id"]
    caller = request[CONTEXT].known_caller
    adapter_id, selector = split_name(name)
    try:
        entry = owned_entry(services.catalog.snapshot, adapter_id, caller)
        found = None if selector is None else services.catalog.resolve(f"{entry.name}@{selector}", caller.scope)
        await remove_adapter(services, entry.name, None if found is None else found.version.version)
    except AdapterNotFoundError:
        raise AdapterNotFoundError(name) from None
    return json_response(DeletedModel(name))


def _base_card(services: Services, caller: Caller) -> ModelCard:
    name = services.spec.name
    return ModelCard(
        id=services.base_name,
        created=STARTED,
        owned_by="lora_serve",
        root=name if _sees_paths(services, caller) else name_of_model(name),
        parent=None,
        digest=None,
        max_model_len=services.spec.max_model_len,
    )


def _adapter_card(services: Services, caller: Caller, entry: CatalogEntry, name: str, ref: AdapterRef) -> ModelCard:
    """`root` is the source of the version that the id means, as vLLM's; of a shared adapter, the version itself."""
    source = entry.version(ref.version).source
    own = source.removeprefix(FOLDER) if _sees_paths(services, caller) else shown_source(source)
    return ModelCard(
        id=name,
        created=int(entry.created),
        owned_by=entry.tenant,
        root=own if caller.scope in (None, entry.tenant) else ref.label,
        parent=services.base_name,
        digest=ref.digest,
        max_model_len=services.spec.max_model_len,
    )


def _sees_paths(services: Services, caller: Caller) -> bool:
    """True for the operator: the admin key, or anybody where only this machine can ask and no key is asked for."""
    is_local = not services.authenticator.required and is_loopback(services.config.host)
    return caller.role is Role.ADMIN or is_local
