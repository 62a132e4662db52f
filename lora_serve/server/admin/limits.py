"""PUT /admin/engine: more or fewer device slots, larger or smaller tiers, without a restart."""

from __future__ import annotations

from aiohttp import web

from lora_serve.core.commands import Resize
from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.admin.listing import get_engine
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import LimitFields
from lora_serve.server.services import SERVICES, Services


async def put_engine(request: web.Request) -> web.StreamResponse:
    """Answers GET /admin/engine's body. What runs is never cut off: its slot goes when its last row ends."""
    services = request.app[SERVICES]
    fields = check_fields(LimitFields, await read_json(request))
    command = Resize(fields.max_loras, fields.adapter_memory, fields.adapter_host_memory, fields.max_cpu_loras)
    if command == Resize():
        raise InvalidRequestError(f"Give at least one of {', '.join(LimitFields.model_fields)}.")
    await services.background.complete(_resize(services, command), "changing limits")
    return await get_engine(request)


async def _resize(services: Services, command: Resize) -> None:
    """Engine first: it alone may refuse."""
    await services.client.adapters(command)
    services.limits.change(command)
    config = services.limits.of(services.adapter_config)
    await services.registry_thread.run(lambda: services.registry.set_host_bytes(config.host_bytes))
