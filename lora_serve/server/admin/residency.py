"""POST /admin/adapters/{id}/pin, /unpin, /prefetch, /evict"""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.catalog_entry import CatalogEntry
from lora_serve.core.commands import Evict, Pin, Prefetch, Unpin
from lora_serve.core.errors import ConflictError, LoraServeError
from lora_serve.server.admin.listing import card_response
from lora_serve.server.services import SERVICES, Services


async def pin(request: web.Request) -> web.StreamResponse:
    """On the device from now on, over restarts too."""
    services, name = request.app[SERVICES], request.match_info["id"]
    await services.background.complete(pin_adapter(services, name), f"pinning {name}")
    return await card_response(services, name)


async def unpin(request: web.Request) -> web.StreamResponse:
    services, name = request.app[SERVICES], request.match_info["id"]
    await services.background.complete(_unpin(services, name), f"unpinning {name}")
    return await card_response(services, name)


async def prefetch(request: web.Request) -> web.StreamResponse:
    """Answers when it is on the device."""
    services, name = request.app[SERVICES], request.match_info["id"]
    await services.client.adapters(Prefetch(services.catalog.entry(name).ref()))
    return await card_response(services, name)


async def evict(request: web.Request) -> web.StreamResponse:
    """Off device and host once no row holds it; it stays registered."""
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    if is_pinned(services, entry.default.digest):
        raise ConflictError(f"The adapter `{name}` is pinned: unpin it first.")
    for version in entry.versions:
        await services.client.adapters(Evict(version.digest))
    return await card_response(services, name)


async def pin_adapter(services: Services, name: str) -> None:
    """Note it in the catalog, then load it; if it cannot be loaded, the note is taken back and the error raised."""
    before = services.catalog.entry(name)
    entry = await set_pinned(services, name, True)
    try:
        await services.client.adapters(Pin(entry.ref()))
    except LoraServeError:
        await set_pinned(services, name, before.pinned)
        raise


async def set_pinned(services: Services, name: str, pinned: bool) -> CatalogEntry:
    """Durable on return. Raises AdapterNotFoundError."""
    return await services.registry_thread.run(lambda: services.registry.set_pinned(name, pinned))


def is_pinned(services: Services, digest: str) -> bool:
    """Whether any pinned id means this content."""
    entries = services.catalog.snapshot.entries.values()
    return any(entry.pinned and entry.default.digest == digest for entry in entries)


async def _unpin(services: Services, name: str) -> None:
    entry = await set_pinned(services, name, False)
    if not is_pinned(services, entry.default.digest):
        await services.client.adapters(Unpin(entry.default.digest))
