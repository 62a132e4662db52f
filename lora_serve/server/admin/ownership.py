"""Which adapters a caller of the admin API may look at and change; what it may not look at does not exist."""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.routes import own_name
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.errors import AdapterNotFoundError, ForbiddenError
from lora_serve.core.tenant import Caller
from lora_serve.server.context import CONTEXT, caller_of
from lora_serve.server.services import SERVICES


def entry_for(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """The adapter that `name` means for this caller. Raises AdapterNotFoundError with the name as given."""
    names = (name,) if caller.scope is None else (own_name(caller.scope, name), name)
    for candidate in names:
        entry = snapshot.entries.get(candidate)
        if entry is not None and entry.is_visible_to(caller.scope):
            return entry
    raise AdapterNotFoundError(name)


def owned_entry(snapshot: Snapshot, name: str, caller: Caller) -> CatalogEntry:
    """One that the caller may change. Raises AdapterNotFoundError, ForbiddenError for one that is only shared."""
    entry = entry_for(snapshot, name, caller)
    if not caller.sees_all and entry.tenant != caller.tenant:
        raise ForbiddenError(f"The adapter `{entry.name}` is shared with you; only its owner may change it.")
    return entry


def own_name_in(request: web.Request) -> str:
    """The full id of the adapter in the URL, which the caller may change. Raises as `owned_entry`."""
    snapshot = request.app[SERVICES].catalog.snapshot
    return owned_entry(snapshot, request.match_info["id"], caller_of(request[CONTEXT])).name
