"""/admin/tenants/{tenant}/keys: make, list, revoke."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from lora_serve.core.errors import ForbiddenError
from lora_serve.core.tenant import ADMIN_CALLER, ApiKey, Role
from lora_serve.server.admin.tenants import tenant_in
from lora_serve.server.answers.json_answer import json_response
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.schemas.admin import CreateKeyFields
from lora_serve.server.schemas.answers.tenancy import KeyCard, KeyList
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory_state import KEY, limits_of


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
    shown = replace(_card(services.keys, key), secret=secret)
    return json_response(shown, status=201, headers={"Cache-Control": "no-store"})


async def list_keys(request: web.Request) -> web.StreamResponse:
    """List a tenant's keys.

    Oldest first. Revoked and expired keys are listed for a while too. `unreadable`, if there are any, for
    the admin: the ids of keys, of whichever tenant, whose records cannot be read.
    """
    keys, tenant = request.app[SERVICES].keys, tenant_in(request)
    keys.directory.snapshot.tenant(tenant)
    data = [_card(keys, key) for key in keys.directory.snapshot.keys_of(tenant)]
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
        return json_response(_card(services.keys, gone))
    role, known = request[CONTEXT].known_caller.role, directory.snapshot.key(tenant, key_id)
    if not role.includes(known.role):
        raise ForbiddenError(f"A key of the role {role} revokes none of the role {known.role}.")
    key = await services.edit(lambda: directory.revoke_key(tenant, key_id), f"revoking a key of {tenant}")
    return json_response(_card(services.keys, key))


def _card(keys: KeyTable, key: ApiKey) -> KeyCard:
    """Times in Unix seconds."""
    return KeyCard(
        id=key.id,
        tenant=key.tenant,
        role=key.role,
        label=key.label,
        quota=limits_of(key.quota),
        active=key.is_valid(keys.directory.clock()),
        created=int(key.created),
        expires=_seconds(key.expires),
        revoked=_seconds(key.revoked),
        last_used=_seconds(keys.last_used(key.id)),
    )


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
