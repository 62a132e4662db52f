"""POST /admin/adapters/{id}/pin, /unpin, /prefetch, /evict"""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.errors import ConflictError, LoraServeError
from lora_serve.core.messages import Evict, Pin, Prefetch, Unpin
from lora_serve.server.admin.adapters import card_response
from lora_serve.server.admin.permissions import own_name_in, pinnable_bytes
from lora_serve.server.context import CONTEXT
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.upkeep.reconciler import pinned_refs


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
