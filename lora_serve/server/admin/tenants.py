"""/admin/tenants: make, list, show, change, delete, what one uses now; their keys; and GET /admin/whoami"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from aiohttp import web
from msgspec import UNSET, structs

from lora_serve.adapters.catalog.edits import TenantRemoval
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.core.errors import AdapterUnavailableError, ForbiddenError, InvalidRequestError, NotFoundError
from lora_serve.core.stats import SlotInfo
from lora_serve.core.tenant import ADMIN_CALLER, ApiKey, Quota, Role, Tenant, check_tenant_name
from lora_serve.server.admin import answers as wire
from lora_serve.server.admin.answers import KeyCard, KeyList
from lora_serve.server.admin.protocol import ChangeTenantFields, CreateKeyFields, CreateTenantFields, PageQuery
from lora_serve.server.answers import json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_fields, check_query, read_json
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory_state import KEY, TENANT, quota_limits

FREEING_TIMEOUT = 60.0  # seconds for running requests to let go of the blobs; after them their traces stay
logger = logging.getLogger(__name__)


async def create_tenant(request: web.Request) -> web.StreamResponse:
    """Create a tenant.

    201 with the tenant's card; 409 if there is a tenant of the name.
    """
    services = request.app[SERVICES]
    fields = check_fields(CreateTenantFields, await read_json(request))
    if check_tenant_name(fields.name, "name") == ADMIN_CALLER.tenant:
        raise InvalidRequestError(f"`{fields.name}` is the name of whoever has the admin key.", param="name")
    request[CONTEXT].audit.subject = request[CONTEXT].audit.owner = fields.name
    directory, quota = services.keys.directory, fields.quota.quota()
    tenant = await services.edit(
        lambda: directory.create_tenant(fields.name, quota, fields.may_use_base, fields.offload),
        f"making the tenant {fields.name}",
    )
    return json_response(_tenant_card(tenant, _counts(services)), status=201)


async def list_tenants(request: web.Request) -> web.StreamResponse:
    """List tenants.

    By name. A tenant's admin sees its own. `unreadable`, if there are any: those whose records cannot be read.
    """
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    query = check_query(PageQuery, request)
    limit, after = query.limit, query.after or ""
    tenants = services.keys.directory.snapshot.tenants
    names = sorted(name for name in tenants if name > after and caller.scope in (None, name))
    counts = _counts(services)
    page = [_tenant_card(tenants[name], counts) for name in names[:limit]]
    held = [name for name in services.keys.directory.snapshot.held_names(TENANT) if caller.scope in (None, name)]
    last = page[-1].name if page else None
    shown = wire.TenantPage(data=page, has_more=len(names) > limit, last_id=last, unreadable=held or UNSET)
    return json_response(shown)


async def get_tenant(request: web.Request) -> web.StreamResponse:
    """Show a tenant."""
    services = request.app[SERVICES]
    tenant = services.keys.directory.snapshot.tenant(tenant_in(request))
    return json_response(_tenant_card(tenant, _counts(services)))


async def change_tenant(request: web.Request) -> web.StreamResponse:
    """Change a tenant's limits and rights.

    A limit that is null ends; what is left out stays as it is. In force within a second on every replica.
    """
    services, name = request.app[SERVICES], tenant_in(request)
    fields = check_fields(ChangeTenantFields, await read_json(request))

    def change(old: Tenant) -> Tenant:
        may_use_base = old.may_use_base if fields.may_use_base is None else fields.may_use_base
        offload = old.offload if fields.offload is None else fields.offload
        return replace(old, may_use_base=may_use_base, offload=offload, quota=fields.quota.quota(old.quota))

    directory = services.keys.directory
    tenant = await services.edit(lambda: directory.change_tenant(name, change), f"changing the tenant {name}")
    return json_response(_tenant_card(tenant, _counts(services)))


async def delete_tenant(request: web.Request) -> web.StreamResponse:
    """Delete a tenant with its keys and adapters, on every replica.

    One without a record may still have adapters.
    """
    services, name = request.app[SERVICES], tenant_in(request)
    gone = await services.background.complete(delete_all_of(services, name), f"deleting the tenant {name}")
    return json_response(wire.DeletedTenant(name=name, adapters=list(gone)))


async def whoami(request: web.Request) -> web.StreamResponse:
    """Show the caller as the server knows it by its key, and its limits."""
    caller = request[CONTEXT].known_caller
    return json_response(
        wire.CallerCard(
            tenant=caller.tenant,
            role=caller.role,
            key_id=caller.key_id,
            may_use_base=caller.may_use_base,
            quota=quota_limits(caller.quota),
            key_quota=quota_limits(caller.key_quota),
            has_neighbours=request.app[SERVICES].overflow is not None,
        )
    )


def tenant_in(request: web.Request) -> str:
    """The tenant in the URL. Raises NotFoundError for another tenant than the caller's, whether it exists or not."""
    name, caller = request.match_info["tenant"], request[CONTEXT].known_caller
    if caller.scope not in (None, name):
        raise NotFoundError(name)
    return name


@dataclass(frozen=True, slots=True)
class _TenantCounts:
    """By tenant, counted once for any number of cards."""

    keys: Counter[str]  # that open something
    adapters: Counter[str]


def _counts(services: Services) -> _TenantCounts:
    directory, now = services.keys.directory, services.keys.directory.clock()
    keys = Counter(key.tenant for key in directory.snapshot.keys.values() if key.is_valid(now))
    return _TenantCounts(keys, Counter(entry.tenant for entry in services.catalog.snapshot.entries.values()))


def _tenant_card(tenant: Tenant, counts: _TenantCounts) -> wire.TenantCard:
    return wire.TenantCard(
        name=tenant.name,
        may_use_base=tenant.may_use_base,
        offload=tenant.offload,
        quota=quota_limits(tenant.quota),
        created=int(tenant.created),
        num_keys=counts.keys[tenant.name],
        num_adapters=counts.adapters[tenant.name],
    )


async def delete_all_of(services: Services, tenant: str) -> tuple[str, ...]:
    """Delete keys first, so that nothing new comes, then adapters. Returns the ids of the adapters; durable on return.
    Blobs, caches and the journals' traces go in the background, on every replica.

    After a crash in between, the same call completes the deletion. Raises NotFoundError, AdapterUnavailableError.
    """
    was_there = await asyncio.to_thread(services.keys.directory.delete_tenant, tenant)
    removal = await asyncio.to_thread(services.catalog.remove_tenant, tenant)
    if not was_there and not removal.names:
        raise NotFoundError(tenant)
    services.background.start(_forget(services, removal), f"forgetting the tenant {tenant}")
    return removal.names


async def _forget(services: Services, removal: TenantRemoval) -> None:
    """Rewrite the journals once every replica has freed the blobs, which the replicas note in the journal."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FREEING_TIMEOUT):
            await _freed(services.catalog.ledger, removal.strays)
    for ledger in (services.catalog.ledger, services.keys.directory.ledger):
        try:
            await asyncio.to_thread(ledger.forget)
        except AdapterUnavailableError as error:
            logger.warning("names of a deleted tenant's adapters stay in a journal's list of changes: %s", error)


async def _freed(ledger: Ledger[CatalogState], digests: Iterable[str]) -> None:
    """Return when no replica holds any of the blobs any more."""
    loop, changed, waited_for = asyncio.get_running_loop(), asyncio.Event(), set(digests)

    def listener() -> None:
        loop.call_soon_threadsafe(changed.set)

    ledger.listen(listener)
    try:
        while waited_for & ledger.state.leases.keys():
            await changed.wait()
            changed.clear()
    finally:
        ledger.unlisten(listener)


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
    return json_response(wire.TenantUse(name, use))


def _held_bytes(slots: Iterable[SlotInfo], own: dict[str, CatalogEntry]) -> int:
    return sum(slot.num_bytes for slot in slots if slot.name in own)


async def create_key(request: web.Request) -> web.StreamResponse:
    """Create a key.

    201 with the secret, which is shown this once. A caller creates no key of a role above its own.
    """
    services, tenant = request.app[SERVICES], tenant_in(request)
    directory = services.keys.directory
    directory.snapshot.tenant(tenant)
    fields = check_fields(CreateKeyFields, await read_json(request))
    caller = request[CONTEXT].known_caller
    if not caller.role.includes(fields.role):
        raise ForbiddenError(f"A key of the role {caller.role} makes none of the role {fields.role}.")
    maker = "" if caller == ADMIN_CALLER else caller.key_id
    expires = None if fields.expires_in is None else directory.clock() + fields.expires_in
    quota = fields.quota.quota()
    key, secret = await services.edit(
        lambda: directory.create_key(tenant, fields.role, fields.label, expires, quota, maker),
        f"making a key of {tenant}",
    )
    request[CONTEXT].audit.subject = f"{tenant}/{key.id}"
    shown = structs.replace(_key_card(services.keys, key), secret=secret)
    return json_response(shown, status=201, headers={"Cache-Control": "no-store"})


async def list_keys(request: web.Request) -> web.StreamResponse:
    """List a tenant's keys.

    Oldest first. Revoked and expired keys are listed for a while too. `unreadable`, if there are any, for
    the admin: the ids of keys, of whichever tenant, whose records cannot be read.
    """
    keys, tenant = request.app[SERVICES].keys, tenant_in(request)
    keys.directory.snapshot.tenant(tenant)
    data = [_key_card(keys, key) for key in keys.directory.snapshot.keys_of(tenant)]
    held = keys.directory.snapshot.held_names(KEY) if request[CONTEXT].known_caller.sees_all else []
    return json_response(KeyList(data, held or UNSET))


async def revoke_key(request: web.Request) -> web.StreamResponse:
    """Revoke a key.

    In force here on return, and within a second on every replica. The record of a key that cannot be read is
    deleted, by the admin alone.
    """
    services, tenant, key_id = request.app[SERVICES], tenant_in(request), request.match_info["key"]
    directory = services.keys.directory
    if request[CONTEXT].known_caller.sees_all and KEY + key_id in directory.snapshot.held:
        await services.edit(lambda: directory.free_key(key_id), "deleting the record of a key")
        gone = ApiKey(key_id, tenant, Role.INFERENCE, "", revoked=directory.clock())
        return json_response(_key_card(services.keys, gone))
    role, known = request[CONTEXT].known_caller.role, directory.snapshot.key(tenant, key_id)
    if not role.includes(known.role):
        raise ForbiddenError(f"A key of the role {role} revokes none of the role {known.role}.")
    key = await services.edit(lambda: directory.revoke_key(tenant, key_id), f"revoking a key of {tenant}")
    return json_response(_key_card(services.keys, key))


def _key_card(keys: KeyTable, key: ApiKey) -> KeyCard:
    """What the API shows of a key; times in Unix seconds."""
    return KeyCard(
        id=key.id,
        tenant=key.tenant,
        role=key.role,
        label=key.label,
        quota=quota_limits(key.quota),
        active=key.is_valid(keys.directory.clock()),
        created=int(key.created),
        expires=_seconds(key.expires),
        revoked=_seconds(key.revoked),
        last_used=_seconds(keys.last_used(key.id)),
    )


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
