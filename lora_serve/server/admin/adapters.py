"""/admin/adapters/{id}: show, share, delete, choose its version (.../route, .../rollback); and /admin/aliases"""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.catalog.entry import Canary, CatalogEntry
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import ConflictError, InvalidRequestError, LoraServeError
from lora_serve.core.messages import Evict, Pin, Prefetch, Unpin
from lora_serve.core.tenant import EVERYBODY, Caller, check_tenant_name
from lora_serve.server.admin.card import Figures, adapter_card, figures_for, tenant_card
from lora_serve.server.admin.permissions import entry_for, own_name_in, pinnable_bytes
from lora_serve.server.answers.json_answer import json_answer, json_response
from lora_serve.server.bodies.json_body import check_fields, check_query, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.defaults import known_defaults
from lora_serve.server.schemas.admin import AliasFields, RouteFields, SharingFields
from lora_serve.server.schemas.answers.adapters import AdapterCard, Alias, AliasList, DeletedAdapter, DeletedAlias
from lora_serve.server.schemas.queries import DeletionQuery
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.upkeep import pinned_refs


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

    New requests get a 404 from now on, running ones finish. A name whose record cannot be read is free again.
    """
    version, name = check_query(DeletionQuery, request).version, request.match_info["id"]
    is_freed = request[CONTEXT].known_caller.sees_all and name in request.app[SERVICES].catalog.snapshot.held
    name = name if is_freed else own_name_in(request)
    await remove_adapter(request.app[SERVICES], name, version)
    return json_response(DeletedAdapter(id=name, version=version))


async def remove_adapter(services: Services, name: str, version: int | None) -> None:
    """Unregister an adapter, or one version; durable on return. The reconciler frees the bytes once no running request
    holds them. Raises AdapterNotFoundError, AdapterUnavailableError.
    """
    await services.edit(lambda: services.registry.delete(name, version), f"deleting {name}")


async def card_response(request: web.Request, name: str) -> web.Response:
    """The card of the adapter that `name` means for the caller. Raises AdapterNotFoundError."""
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    entry = entry_for(services.catalog.snapshot, name, caller)
    return json_response(await card_of(services, entry, caller))


async def card_of(services: Services, entry: CatalogEntry, caller: Caller) -> AdapterCard:
    """The adapter's card, with the figures of this moment that the caller may see."""
    return card_from(services, entry, await figures_for(services, caller), caller)


def card_from(services: Services, entry: CatalogEntry, figures: Figures, caller: Caller) -> AdapterCard:
    """The adapter's card as the caller may see it."""
    aliases = tuple(services.catalog.snapshot.aliases_of(entry.name))
    defaults = known_defaults(entry.metadata, services.config).card()
    rule = services.adapter_config.adapter_chat_templates
    if caller.scope is not None:
        return tenant_card(entry, caller.scope, figures, aliases, defaults, rule)
    return adapter_card(entry, figures, aliases, defaults, rule)


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

    def made() -> AliasList:
        return AliasList([Alias(alias, aliases[alias]) for alias in sorted(aliases)])

    return await json_answer(request, made, 5 * len(aliases))


async def set_alias(request: web.Request) -> web.StreamResponse:
    """Set an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    target = check_fields(AliasFields, await read_json(request)).target
    if check_adapter_id(alias) == services.base_name:
        raise ConflictError(f"`{alias}` is the base model's name.")
    await services.edit(lambda: services.catalog.set_alias(alias, target), f"naming {alias}")
    return json_response(Alias(alias, target))


async def remove_alias(request: web.Request) -> web.StreamResponse:
    """Remove an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    await services.edit(lambda: services.catalog.remove_alias(alias), f"removing {alias}")
    return json_response(DeletedAlias(alias))


async def pin(request: web.Request) -> web.StreamResponse:
    """Keep an adapter on the device from now on, over restarts too."""
    services, name = request.app[SERVICES], own_name_in(request)
    max_bytes = pinnable_bytes(request[CONTEXT].known_caller)
    await services.background.complete(_pin(services, name, max_bytes), f"pinning {name}")
    return await card_response(request, name)


async def unpin(request: web.Request) -> web.StreamResponse:
    """End the pinning of an adapter."""
    services, name = request.app[SERVICES], own_name_in(request)
    await services.background.complete(_unpin(services, name), f"unpinning {name}")
    return await card_response(request, name)


async def prefetch(request: web.Request) -> web.StreamResponse:
    """Load an adapter before it is asked for.

    Answers when the adapter is on the device.
    """
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    for version in entry.routed:
        await services.client.adapters(Prefetch(entry.ref(version)))
    return await card_response(request, name)


async def evict(request: web.Request) -> web.StreamResponse:
    """Take an adapter off device and host.

    That is done once no row holds it; it stays registered.
    """
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    pinned = pinned_refs(services.catalog.snapshot)
    if any(version.digest in pinned for version in entry.routed):
        raise ConflictError(f"The adapter `{name}` is pinned: unpin it first.")
    for version in entry.versions:
        await services.client.adapters(Evict(version.digest))
    return await card_response(request, name)


async def _pin(services: Services, name: str, max_bytes: int | None) -> None:
    """Note the pin in the catalog, then load; if that fails, the note is taken back and the error raised."""
    before = services.catalog.entry(name)
    entry = await set_pinned(services, name, True, max_bytes)
    try:
        for version in entry.routed:
            await services.client.adapters(Pin(entry.ref(version)))
    except LoraServeError:
        await set_pinned(services, name, before.pinned)
        raise


async def set_pinned(services: Services, name: str, pinned: bool, max_bytes: int | None = None) -> CatalogEntry:
    """Durable on return. Raises AdapterNotFoundError, ForbiddenError beyond `max_bytes` of its tenant."""
    catalog = services.catalog
    return await services.edit(lambda: catalog.set_pinned(name, pinned, max_bytes), f"noting the pin of {name}")


async def _unpin(services: Services, name: str) -> None:
    entry = await set_pinned(services, name, False)
    still_pinned = pinned_refs(services.catalog.snapshot)
    for version in entry.routed:
        if version.digest not in still_pinned:
            await services.client.adapters(Unpin(version.digest))
