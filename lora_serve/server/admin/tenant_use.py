"""GET /admin/tenants/{tenant}/use: what a tenant uses at this moment, beside its limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.core.stats import SlotInfo
from lora_serve.core.tenant import Quota
from lora_serve.server.admin.tenants import tenant_in
from lora_serve.server.context import CONTEXT
from lora_serve.server.services import SERVICES


async def get_use(request: web.Request) -> web.StreamResponse:
    """Show what a tenant uses of its limits now.

    `max_running` and `max_queued` are this server's own counts. What is counted only for a limit, and has none, is
    null; so are the bytes on the device to anybody but the operator.
    """
    services, name = request.app[SERVICES], tenant_in(request)
    tenant = services.keys.directory.snapshot.tenant(name)
    own = {entry.name: entry for entry in services.catalog.snapshot.entries.values() if entry.tenant == name}
    use: dict[str, int | None] = dict.fromkeys(field.name for field in fields(Quota))
    use |= await services.quotas.used(tenant)
    use["max_queued"] = services.client.gate.num_waiting(name)
    use["max_adapters"] = len(own)
    use["max_stored_bytes"] = sum(version.num_bytes for entry in own.values() for version in entry.versions)
    if request[CONTEXT].known_caller.sees_all:
        held = _held_bytes((await services.client.stats()).slots, own)
        use["device_bytes_guaranteed"] = use["device_bytes_max"] = held
    return web.json_response({"object": "tenant_use", "tenant": name, "use": use})


def _held_bytes(slots: Iterable[SlotInfo], own: dict[str, CatalogEntry]) -> int:
    return sum(slot.num_bytes for slot in slots if slot.name in own)
