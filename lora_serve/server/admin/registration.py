"""POST /admin/adapters, and the steps that every way of registering has in common."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.catalog import own_name
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import tenant_of
from lora_serve.adapters.registration.registry import Registered, private_folder
from lora_serve.adapters.sources.base import RegistrationProgress, Stage, Staged
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.client.verifier import carried_out
from lora_serve.core.adapter import check_adapter_id, check_new_adapter_id
from lora_serve.core.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    LoraServeError,
    NotReadyError,
    RateLimitedError,
)
from lora_serve.core.messages import Pin
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.adapters import card_response, remove_adapter, set_pinned
from lora_serve.server.admin.answers import RegistrationCard, RegistrationList
from lora_serve.server.admin.card import card_of, own_name_in
from lora_serve.server.admin.protocol import MetadataFields, RegisterFields
from lora_serve.server.answers import json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.defaults import read_defaults
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.constraints import StructuredFields, constraint_of
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.directory_state import REVOKED, TENANT
from lora_serve.text import reasoning, tool_calls

Act = Callable[[], None]
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
logger = logging.getLogger(__name__)


def _nothing() -> None: ...


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


async def register_adapter(request: web.Request) -> web.StreamResponse:
    """Register an adapter from a path or a source.

    201 with the card; 200 if the id had this very content already.
    """
    services = request.app[SERVICES]
    fields = check_fields(RegisterFields, await read_json(request))
    caller = request[CONTEXT].known_caller
    registration = registration_for(services, caller, fields)
    _check_source(services, caller, registration.source)
    with_quota(services, registration).check(services.catalog.snapshot)  # before anything is fetched
    await services.quotas.begin_registration(caller)
    return await answer_registration(
        request, registration, RegistrationProgress(registration.id, caller.scope, Stage.FETCHING)
    )


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


def registration_for(services: Services, caller: Caller, fields: RegisterFields) -> Registration:
    """The registration as it is carried out: a tenant's own admin registers under its tenant's name and namespace.

    Raises InvalidRequestError for a malformed id, ForbiddenError for another tenant's name or a pin, ConflictError if
    the id means something else already.
    """
    wanted = Registration(**dict(fields), by_admin=caller.sees_all)
    if not caller.sees_all:
        if wanted.tenant not in (None, caller.tenant):
            raise ForbiddenError("This key registers for its own tenant only: leave `tenant` out.")
        if wanted.pin:
            raise ForbiddenError("Register the adapter first, then pin it.")
        name = check_adapter_id(own_name(caller.tenant, check_adapter_id(wanted.id)))
        wanted = replace(wanted, id=name, tenant=caller.tenant)
        known = services.catalog.snapshot.entries.get(name)
        if name in services.catalog.snapshot.aliases or (known is not None and known.tenant != caller.tenant):
            raise ConflictError(f"The id `{name}` is taken.")  # the caller is not told by whom
    check_new_id(services, wanted.id)
    return wanted


def check_new_id(services: Services, adapter_id: str) -> None:
    """Raises InvalidRequestError, ConflictError."""
    if check_new_adapter_id(adapter_id) == services.base_name:
        raise ConflictError(f"`{adapter_id}` is the base model's name.")


def _check_source(services: Services, caller: Caller, source: str) -> None:
    """Raises ForbiddenError unless the operator lets tenants register from the source (--tenant-source)."""
    allowed = services.adapter_config.tenant_source
    match = _SCHEME.match(source)
    if not caller.sees_all and (match is None or match[1].lower() not in allowed):
        known = ", ".join(f"{scheme}://" for scheme in allowed)
        more = f"; register from {known}" if known else ""
        raise ForbiddenError(f"Tenants may not register from this source: upload the adapter (PUT){more}.")


def with_quota(services: Services, registration: Registration) -> Registration:
    """The registration under its owner's present quota. Raises UnreadableRecordError."""
    owner = registration.owner_in(services.catalog.snapshot)
    return replace(registration, quota=services.keys.directory.quota_of(owner))


async def answer_registration(
    request: web.Request,
    registration: Registration,
    progress: RegistrationProgress,
    uploaded: Staged | None = None,
    hand_over: Act = _nothing,
) -> web.StreamResponse:
    """Carry out a registration and answer with the card; see `carry_out`."""
    services, context = request.app[SERVICES], request[CONTEXT]
    caller, note = context.known_caller, context.audit
    await check_metadata(services, caller, registration.metadata)
    note.subject, note.owner = registration.id, tenant_of(registration.id, registration.tenant)
    registered, warnings = await carry_out(request, registration, progress, uploaded, hand_over)
    entry = services.catalog.snapshot.entries.get(registration.id)
    if entry is None or entry.tenant != registered.entry.tenant:
        entry = registered.entry  # it was deleted since: it is registered all the same
    card = await card_of(services, entry, caller)
    card["warnings"] = [*card["warnings"], *warnings]
    return json_response(card, status=201 if registered.created else 200)


async def carry_out(
    request: web.Request,
    registration: Registration,
    progress: RegistrationProgress,
    uploaded: Staged | None = None,
    hand_over: Act = _nothing,
) -> tuple[Registered, list[str]]:
    """Stage, register and pin, to the end even if the client leaves. Failures after the registration come as warnings.

    `progress`: listed until the end. `uploaded`: files that are here already; others are fetched from their source.
    `hand_over`: called as the work begins, which from then on disposes of the uploaded files.
    """
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    owner = registration.owner_in(services.catalog.snapshot)
    services.registrations.check(owner)

    async def work() -> tuple[Registered, list[str]]:
        with services.registering.listed(progress):
            staged = uploaded or await services.staging.stage(registration.source, owner, progress.receive)
            known = services.catalog.snapshot.entries.get(registration.id)
            call = functools.partial(register, services, registration, staged, progress)
            try:
                registered = await services.registrations.run(call, owner)
            except (NotReadyError, RateLimitedError):  # no thread has seen it, so nobody else removes it
                await asyncio.to_thread(remove_folder, staged.folder)
                raise
            await check_still_there(services, caller, registered)
            return registered, await _pin(services, registered, known is not None and known.pinned)

    hand_over()  # nothing is awaited from here to the start of the work: no cancellation comes between
    registered, warnings = await services.background.complete(work(), f"registering {registration.id}")
    note = request[CONTEXT].audit
    note.owner, note.digest = registered.entry.tenant, registered.ref.digest
    return registered, warnings


def register(
    services: Services, registration: Registration, staged: Staged, progress: RegistrationProgress
) -> Registered:
    """Called on a thread of `registrations`, in the owner's turn. Removes the staged folder."""
    with private_folder(lambda: staged.folder):
        steps = services.registry.register(with_quota(services, registration), staged, progress)
        return carried_out(steps, services.verifier)


async def _pin(services: Services, registered: Registered, was_pinned: bool) -> list[str]:
    """A pinned id's new version comes onto the device; the reconciler lets the old one go."""
    if not registered.entry.pinned or registered.ref.version != registered.entry.default_version:
        return []
    try:
        await services.client.adapters(Pin(registered.ref))
    except LoraServeError as error:
        logger.warning("%s is registered but could not be pinned: %s", registered.ref.label, error)
        await set_pinned(services, registered.ref.name, was_pinned)
        return [f"It is registered, but could not be pinned: {error}"]
    return []


async def check_still_there(services: Services, caller: Caller, made: Registered) -> None:
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
