"""POST /admin/adapters/{id}/pin, /unpin, /prefetch, /evict"""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.commands import Evict, Pin, Prefetch, Unpin
from lora_serve.core.errors import ConflictError, LoraServeError
from lora_serve.server.admin.listing import card_response
from lora_serve.server.admin.ownership import own_name_in
from lora_serve.server.admin.tenant_rules import check_pin
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.chosen import caller_of
from lora_serve.server.reconciler import pinned_refs
from lora_serve.server.services import SERVICES, Services


async def pin(request: web.Request) -> web.StreamResponse:
    """On the device from now on, over restarts too."""
    services, name = request.app[SERVICES], own_name_in(request)
    check_pin(services, caller_of(request[CONTEXT]), services.catalog.entry(name))
    await services.background.complete(pin_adapter(services, name), f"pinning {name}")
    return await card_response(request, name)


async def unpin(request: web.Request) -> web.StreamResponse:
    services, name = request.app[SERVICES], own_name_in(request)
    await services.background.complete(_unpin(services, name), f"unpinning {name}")
    return await card_response(request, name)


async def prefetch(request: web.Request) -> web.StreamResponse:
    """Answers when it is on the device."""
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    for version in entry.routed:
        await services.client.adapters(Prefetch(entry.ref(version)))
    return await card_response(request, name)


async def evict(request: web.Request) -> web.StreamResponse:
    """Off device and host once no row holds it; it stays registered."""
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    pinned = pinned_refs(services.catalog.snapshot)
    if any(version.digest in pinned for version in entry.routed):
        raise ConflictError(f"The adapter `{name}` is pinned: unpin it first.")
    for version in entry.versions:
        await services.client.adapters(Evict(version.digest))
    return await card_response(request, name)


async def pin_adapter(services: Services, name: str) -> None:
    """Note it in the catalog, then load it; if it cannot be loaded, the note is taken back and the error raised."""
    before = services.catalog.entry(name)
    entry = await set_pinned(services, name, True)
    try:
        for version in entry.routed:
            await services.client.adapters(Pin(entry.ref(version)))
    except LoraServeError:
        await set_pinned(services, name, before.pinned)
        raise


async def set_pinned(services: Services, name: str, pinned: bool) -> CatalogEntry:
    """Durable on return. Raises AdapterNotFoundError."""
    return await services.edit(lambda: services.registry.set_pinned(name, pinned), f"noting the pin of {name}")


async def _unpin(services: Services, name: str) -> None:
    entry = await set_pinned(services, name, False)
    still_pinned = pinned_refs(services.catalog.snapshot)
    for version in entry.routed:
        if version.digest not in still_pinned:
            await services.client.adapters(Unpin(version.digest))
