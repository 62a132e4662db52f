"""PUT /admin/engine: device slots, tiers, and when and how large batches are, changed without a restart."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import Resize, Tune
from lora_serve.server.admin.listing import get_engine
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import LimitFields
from lora_serve.server.services import SERVICES, Services

_MAY_BE_OFF = ("preferred_batch_size", "latency_target_ms", "inter_token_target_ms")


async def put_engine(request: web.Request) -> web.StreamResponse:
    """Answers GET /admin/engine's body. What runs is never cut off: its slot goes when its last row ends."""
    services = request.app[SERVICES]
    body = await read_json(request, keep_null=True)
    fields = check_fields(LimitFields, {name: _value(name, item) for name, item in body.items()})
    resize = Resize(fields.max_loras, fields.adapter_memory, fields.adapter_host_memory, fields.max_cpu_loras)
    tune = _tune(fields)
    if (resize, tune) == (Resize(), Tune()):
        raise InvalidRequestError(f"Give at least one of {', '.join(LimitFields.model_fields)}.")
    await services.background.complete(_change(services, resize, tune), "changing limits")
    return await get_engine(request)


def _value(name: str, value: Any) -> Any:
    return 0 if value is None and name in _MAY_BE_OFF else value


def _tune(fields: LimitFields) -> Tune:
    return Tune(
        fields.max_num_seqs,
        fields.max_num_batched_tokens,
        _seconds(fields.batch_wait_ms),
        fields.preferred_batch_size,
        _seconds(fields.latency_target_ms),
        _seconds(fields.inter_token_target_ms),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


async def _change(services: Services, resize: Resize, tune: Tune) -> None:
    """All or none: what the engine would refuse of `tune` is refused before `resize` is done."""
    if tune != Tune() and (batcher := (await services.client.stats()).batcher) is not None:
        tune.applied_to(batcher.limits)
    if resize != Resize():
        await _resize(services, resize)
    if tune != Tune():
        await services.client.adapters(tune)


async def _resize(services: Services, command: Resize) -> None:
    """Engine first: it alone may refuse."""
    await services.client.adapters(command)
    services.limits.change(command)
    config = services.limits.of(services.adapter_config)
    services.registry.set_host_bytes(config.host_bytes)
