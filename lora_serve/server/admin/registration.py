"""POST /admin/adapters, and what follows every registration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from lora_serve.adapters.registry import Registration
from lora_serve.core.adapter import AdapterRef, check_adapter_id
from lora_serve.core.commands import Pin, Unpin
from lora_serve.core.errors import AdapterNotFoundError, ConflictError, InvalidRequestError, LoraServeError
from lora_serve.server.admin.card import adapter_card
from lora_serve.server.admin.listing import engine_stats
from lora_serve.server.admin.residency import is_pinned, set_pinned
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import RegisterFields
from lora_serve.server.services import SERVICES, Services

logger = logging.getLogger(__name__)


async def register_adapter(request: web.Request) -> web.StreamResponse:
    """201 with the card; 200 if this very content was there already under this id."""
    services = request.app[SERVICES]
    fields = check_fields(RegisterFields, await read_json(request))
    check_new_id(services, fields.id)
    if "://" in fields.source:
        message = "`source` must be a folder inside an --adapter-root; hubs and buckets come in a later version."
        raise InvalidRequestError(message, param="source")
    return await complete_registration(
        services,
        fields.id,
        lambda: services.registry.register_folder(
            fields.id, fields.source, fields.tenant, fields.pin, fields.metadata, fields.allow_noop
        ),
    )


def check_new_id(services: Services, adapter_id: str) -> None:
    """Raises InvalidRequestError, ConflictError."""
    if check_adapter_id(adapter_id) == services.base_name:
        raise ConflictError(f"`{adapter_id}` is the base model's name.")


async def complete_registration(
    services: Services, adapter_id: str, register: Callable[[], Registration]
) -> web.StreamResponse:
    """Run `register` on the registry's thread and answer with the card."""
    registration, warnings = await register_and_pin(services, adapter_id, register)
    card = adapter_card(services.catalog.entry(adapter_id), await engine_stats(services), services.places_of)
    card["warnings"] = [*card["warnings"], *warnings]
    return web.json_response(card, status=201 if registration.created else 200)


async def register_and_pin(
    services: Services, adapter_id: str, register: Callable[[], Registration]
) -> tuple[Registration, list[str]]:
    """Both to their end, even if the client leaves. What went wrong after the registration comes as warnings."""

    async def work() -> tuple[Registration, list[str]]:
        before = _default_of(services, adapter_id)
        was_pinned = before is not None and services.catalog.entry(adapter_id).pinned
        registration = await services.registry_thread.run(register)
        return registration, await _move_pin(services, registration, before, was_pinned)

    return await services.background.complete(work(), f"registering {adapter_id}")


async def _move_pin(
    services: Services, registration: Registration, before: AdapterRef | None, was_pinned: bool
) -> list[str]:
    """A pinned id stays pinned: its new version comes onto the device, its old one may leave."""
    if not registration.entry.pinned:
        return []
    try:
        await services.client.adapters(Pin(registration.ref))
        if before is not None and not is_pinned(services, before.digest):
            await services.client.adapters(Unpin(before.digest))
    except LoraServeError as error:
        logger.warning("%s is registered but could not be pinned: %s", registration.ref.label, error)
        await set_pinned(services, registration.ref.name, was_pinned)
        return [f"It is registered, but could not be pinned: {error}"]
    return []


def _default_of(services: Services, adapter_id: str) -> AdapterRef | None:
    try:
        return services.catalog.resolve(adapter_id)
    except AdapterNotFoundError:
        return None
