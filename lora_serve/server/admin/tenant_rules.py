"""What the admin API lets a tenant's own admin do with adapters."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from lora_serve.adapters.catalog.routes import own_name
from lora_serve.adapters.registration.registry import Registration
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    AuthenticationError,
    ConflictError,
    ForbiddenError,
)
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.removal import remove_adapter
from lora_serve.server.schemas.admin import RegisterFields
from lora_serve.server.services import Services
from lora_serve.tenancy.directory.keys import REVOKED

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def registration_for(services: Services, caller: Caller, fields: RegisterFields) -> RegisterFields:
    """As it is for whoever sees all; a tenant's gets its own namespace and name.

    Raises InvalidRequestError for an id that is none, ForbiddenError for another tenant's name or a pin, ConflictError
    if the id means something else already.
    """
    if caller.sees_all:
        return fields
    if fields.tenant not in (None, caller.tenant):
        raise ForbiddenError("This key registers for its own tenant only: leave `tenant` out.")
    if fields.pin:
        raise ForbiddenError("Register the adapter first, then pin it.")
    name = check_adapter_id(own_name(caller.tenant, check_adapter_id(fields.id)))
    snapshot = services.catalog.snapshot
    known = snapshot.entries.get(name)
    if name in snapshot.aliases or (known is not None and known.tenant != caller.tenant):
        raise ConflictError(f"The id `{name}` is taken.")  # by whom is not this caller's to know
    return fields.model_copy(update={"id": name, "tenant": caller.tenant})


def check_source(services: Services, caller: Caller, source: str) -> None:
    """Raises ForbiddenError unless the operator lets tenants register from there (--tenant-source)."""
    allowed = services.adapter_config.tenant_sources
    match = _SCHEME.match(source)
    if not caller.sees_all and (match is None or match[1].lower() not in allowed):
        known = ", ".join(f"{scheme}://" for scheme in allowed)
        more = f"; register from {known}" if known else ""
        raise ForbiddenError(f"Tenants may not register from this source: upload the adapter (PUT){more}.")


def pinnable_bytes(caller: Caller) -> int | None:
    """A tenant pins within the device memory that is guaranteed to it; None: no limit."""
    return None if caller.sees_all else caller.quota.device_bytes_guaranteed or 0


async def check_still_there(services: Services, caller: Caller, made: Registration) -> None:
    """A registration may end after its tenant was deleted, at another replica too: then nothing of it stays.

    The deletion first takes the tenant away and then its adapters. So whoever finds the tenant there after its own
    commit knows that the deletion will find the adapter. One that was made again meanwhile is another tenant. Raises
    AuthenticationError.
    """
    if caller.sees_all:
        return
    with suppress(AdapterUnavailableError):
        await asyncio.to_thread(services.keys.directory.refresh)
    tenant = services.keys.directory.snapshot.tenants.get(caller.tenant)
    if tenant is not None and tenant.created == caller.since:
        return
    if made.created:
        with suppress(AdapterNotFoundError):
            await remove_adapter(services, made.ref.name, made.ref.version)
    raise AuthenticationError(REVOKED)
