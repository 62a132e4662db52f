"""Which adapters a caller of the admin API may see, change and register. An adapter that it may not see is a 404."""

from __future__ import annotations

import re

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.resolution import own_name
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.adapter import check_adapter_id
from lora_serve.core.errors import AdapterNotFoundError, ConflictError, ForbiddenError, InvalidRequestError
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.protocol import RegisterFields
from lora_serve.server.context import CONTEXT
from lora_serve.server.services import SERVICES, Services

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def entry_for(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """The adapter that `name` means for the caller. Raises AdapterNotFoundError with the name as given;
    UnreadableRecordError for a held name.
    """
    names = (name,) if caller.scope is None else (own_name(caller.scope, name), name)
    for candidate in names:
        entry = snapshot.entries.get(candidate)
        if entry is not None and entry.is_visible_to(caller.scope):
            return entry
        snapshot.check_held(candidate, caller.scope)
    raise AdapterNotFoundError(name)


def owned_entry(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """An adapter that the caller may change. Raises AdapterNotFoundError; ForbiddenError if it is only shared;
    InvalidRequestError for an alias, to whoever sees all.
    """
    if caller.sees_all and (target := snapshot.aliases.get(name)) is not None:
        raise InvalidRequestError(
            f"`{name}` is an alias of `{target}`: name the adapter itself. DELETE /admin/aliases/{name} takes "
            f"the alias away (lora-serve adapters alias --delete {name}).",
            param="id",
        )
    entry = entry_for(snapshot, name, caller)
    if not caller.sees_all and entry.tenant != caller.tenant:
        raise ForbiddenError(f"The adapter `{entry.name}` is shared with you; only its owner may change it.")
    return entry


def own_name_in(request: web.Request) -> str:
    """The full id of the adapter in the URL, which the caller may change. Raises what `owned_entry` does."""
    snapshot = request.app[SERVICES].catalog.snapshot
    return owned_entry(snapshot, request.match_info["id"], request[CONTEXT].known_caller).name


def registration_for(services: Services, caller: Caller, fields: RegisterFields) -> RegisterFields:
    """The registration as it is carried out: a tenant's own admin registers under its tenant's name and namespace.

    Raises InvalidRequestError for a malformed id, ForbiddenError for another tenant's name or a pin, ConflictError if
    the id means something else already.
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
        raise ConflictError(f"The id `{name}` is taken.")  # the caller is not told by whom
    return fields.model_copy(update={"id": name, "tenant": caller.tenant})


def check_source(services: Services, caller: Caller, source: str) -> None:
    """Raises ForbiddenError unless the operator lets tenants register from the source (--tenant-source)."""
    allowed = services.adapter_config.tenant_source
    match = _SCHEME.match(source)
    if not caller.sees_all and (match is None or match[1].lower() not in allowed):
        known = ", ".join(f"{scheme}://" for scheme in allowed)
        more = f"; register from {known}" if known else ""
        raise ForbiddenError(f"Tenants may not register from this source: upload the adapter (PUT){more}.")


def pinnable_bytes(caller: Caller) -> int | None:
    """The device memory within which a caller may pin: a tenant's guaranteed share. None: no limit."""
    return None if caller.sees_all else caller.quota.device_bytes_guaranteed or 0
