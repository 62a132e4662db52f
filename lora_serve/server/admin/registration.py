"""POST /admin/adapters, and the steps that every way of registering has in common."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.entry import tenant_of
from lora_serve.adapters.catalog.snapshot import owner_of
from lora_serve.adapters.registration.registry import Registration
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.core.adapter import check_new_adapter_id
from lora_serve.core.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    LoraServeError,
    NotReadyError,
    RateLimitedError,
)
from lora_serve.core.messages import Pin
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.adapters import card_of, card_response, remove_adapter, set_pinned
from lora_serve.server.admin.answers import RegistrationCard, RegistrationList
from lora_serve.server.admin.permissions import check_source, own_name_in, registration_for
from lora_serve.server.admin.protocol import MetadataFields, RegisterFields
from lora_serve.server.answers import json_response
from lora_serve.server.background.registering import Progress, Stage, Staged
from lora_serve.server.context import CONTEXT, AuditNote
from lora_serve.server.inference.defaults import read_defaults
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.constraints import StructuredFields, constraint_of
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.directory.state import REVOKED, TENANT
from lora_serve.text import reasoning, tool_calls


async def set_metadata(request: web.Request) -> web.StreamResponse:
    """Set an adapter's metadata without a registration.

    Requests have its defaults from now on.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    metadata = check_fields(MetadataFields, await read_json(request)).metadata
    await check_metadata(services, request[CONTEXT].known_caller, metadata)
    await services.edit(lambda: services.catalog.set_metadata(name, metadata), f"describing {name}")
    return await card_response(request, name)


async def check_metadata(services: Services, caller: Caller, metadata: Mapping[str, Any] | None) -> None:
    """Refuse defaults that no request could have. Raises InvalidRequestError naming the field, RateLimitedError."""
    defaults = read_defaults(metadata, services.config)
    _check_parser("tool_call_parser", defaults.tool_call_parser, tool_calls.names())
    _check_parser("reasoning_parser", defaults.reasoning_parser, reasoning.names())
    if defaults.response_format is None:
        return
    try:
        constraint = constraint_of(StructuredFields(response_format=defaults.response_format))
        if constraint is not None:
            await services.grammars.of(caller.tenant, constraint)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"metadata: {error}", param=f"metadata.{error.param}") from None


def _check_parser(field: str, name: str | None, known: Sequence[str]) -> None:
    allowed = ("auto", "none", *known)
    if name is not None and name not in allowed:
        message = f"metadata: `{field}`: there is no {name!r}; there are {', '.join(allowed)}."
        raise InvalidRequestError(message, param=f"metadata.{field}")


logger = logging.getLogger(__name__)


def _nothing() -> None: ...


async def register_adapter(request: web.Request) -> web.StreamResponse:
    """Register an adapter from a path or a source.

    201 with the card; 200 if the id had this very content already.
    """
    services = request.app[SERVICES]
    fields = check_fields(RegisterFields, await read_json(request))
    caller = request[CONTEXT].known_caller
    fields = registration_for(services, caller, fields)
    check_new_id(services, fields.id)
    check_source(services, caller, fields.source)
    services.registry.check_new(fields.id, fields.tenant, fields.metadata)  # before anything is fetched
    await services.quotas.begin_registration(caller)
    note, owner = request[CONTEXT].audit, owner_of(services.catalog.snapshot, fields.id, fields.tenant)
    progress = Progress(fields.id, caller.scope, Stage.FETCHING)

    async def stage() -> Staged:
        return await services.staging.stage(fields.source, owner, progress.receive)

    return await complete_registration(services, fields, stage, caller, note, progress)


async def list_registrations(request: web.Request) -> web.StreamResponse:
    """List the registrations under way.

    A tenant-admin sees those of its own tenant. `bytes`: that came so far.
    """
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    rows = [
        RegistrationCard(progress.id, progress.stage, progress.num_bytes, progress.total_bytes, progress.started)
        for progress in services.registering.seen_by(caller.scope, caller.since)
    ]
    return json_response(RegistrationList(rows))


def check_new_id(services: Services, adapter_id: str) -> None:
    """Raises InvalidRequestError, ConflictError."""
    if check_new_adapter_id(adapter_id) == services.base_name:
        raise ConflictError(f"`{adapter_id}` is the base model's name.")


async def complete_registration(
    services: Services,
    fields: RegisterFields,
    stage: Callable[[], Awaitable[Staged]],
    caller: Caller,
    note: AuditNote,
    progress: Progress,
    hand_over: Callable[[], None] = _nothing,
) -> web.StreamResponse:
    """Bring the files here, register them and answer with the card. `hand_over`: see `register_and_pin`."""
    await check_metadata(services, caller, fields.metadata)
    note.subject, note.owner = fields.id, tenant_of(fields.id, fields.tenant)

    def register(staged: Staged) -> Registration:
        progress.examine()
        return services.registry.register_staged(
            fields.id,
            staged.folder,
            staged.source,
            fields.tenant,
            fields.pin,
            fields.metadata,
            fields.allow_noop,
            fields.activate,
            digest=fields.digest,
            by_admin=caller.sees_all,
            on_probe=progress.probe,
        )

    registration, warnings = await register_and_pin(
        services, progress, stage, register, caller, fields.tenant, hand_over
    )
    note.owner, note.digest = registration.entry.tenant, registration.ref.digest
    card = await card_of(services, services.catalog.entry(fields.id), caller)
    card["warnings"] = [*card["warnings"], *warnings]
    return json_response(card, status=201 if registration.created else 200)


async def register_and_pin(
    services: Services,
    progress: Progress,
    stage: Callable[[], Awaitable[Staged]],
    register: Callable[[Staged], Registration],
    caller: Caller,
    owner: str | None = None,
    hand_over: Callable[[], None] = _nothing,
) -> tuple[Registration, list[str]]:
    """Stage, register and pin, to the end even if the client leaves. Failures after the registration come as warnings.
    `progress`: listed until then. `owner`: the tenant that the request names. `hand_over`: called as the work begins,
    which from then on disposes of files that are here already.

    `register` runs on a thread of `registrations`, in the owner's turn, and disposes of the staged folder.
    """
    tenant = owner_of(services.catalog.snapshot, progress.id, owner)
    services.registrations.check(tenant)

    async def work() -> tuple[Registration, list[str]]:
        with services.registering.listed(progress):
            staged = await stage()
            known = services.catalog.snapshot.entries.get(progress.id)
            try:
                registration = await services.registrations.run(functools.partial(register, staged), tenant)
            except (NotReadyError, RateLimitedError):  # no thread has seen it, so nobody else removes it
                await asyncio.to_thread(remove_folder, staged.folder)
                raise
            await check_still_there(services, caller, registration)
            return registration, await _pin(services, registration, known is not None and known.pinned)

    hand_over()  # nothing is awaited from here to the start of the work: no cancellation comes between
    return await services.background.complete(work(), f"registering {progress.id}")


async def _pin(services: Services, registration: Registration, was_pinned: bool) -> list[str]:
    """A pinned id's new version comes onto the device; the reconciler lets the old one go."""
    if not registration.entry.pinned or registration.ref.version != registration.entry.default_version:
        return []
    try:
        await services.client.adapters(Pin(registration.ref))
    except LoraServeError as error:
        logger.warning("%s is registered but could not be pinned: %s", registration.ref.label, error)
        await set_pinned(services, registration.ref.name, was_pinned)
        return [f"It is registered, but could not be pinned: {error}"]
    return []


async def check_still_there(services: Services, caller: Caller, made: Registration) -> None:
    """Take a registration back if its tenant was deleted meanwhile, perhaps at another replica.

    A deletion removes first the tenant and then its adapters. So if the tenant is there after the commit here, a
    deletion still to come finds the adapter. A tenant that was created again meanwhile is another one. Raises
    AuthenticationError.
    """
    if caller.sees_all:
        return
    with suppress(AdapterUnavailableError):
        await asyncio.to_thread(services.keys.directory.refresh)
    services.keys.directory.snapshot.check_held(TENANT, caller.tenant)
    tenant = services.keys.directory.snapshot.tenants.get(caller.tenant)
    if tenant is not None and tenant.created == caller.since:
        return
    if made.created:
        with suppress(AdapterNotFoundError):
            await remove_adapter(services, made.ref.name, made.ref.version)
    raise AuthenticationError(REVOKED)
