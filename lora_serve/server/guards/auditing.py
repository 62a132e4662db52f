"""One line in the audit log for every admin act, durable before the answer goes out.

An act is a changing request to an admin route by a caller whose key is known, even if it is refused. Attempts without
a known key are in the access log only, so that nobody can fill the disk from outside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from lora_serve.adapters.catalog.resolution import own_name
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.adapter import split_name
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.tenant import Caller
from lora_serve.server.answers.errors import CLIENT_LEFT, wire_error
from lora_serve.server.context import AuditNote, RequestContext
from lora_serve.server.route import Route
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.directory_state import without_secrets

logger = logging.getLogger(__name__)

_MAX_SUBJECT = 300
_UNAVAILABLE = 503


async def audited(
    request: web.Request, route: Route, context: RequestContext, answered: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """The answer, once an admin act is noted; 503 in its place if the act could not be noted."""
    services = request.app[SERVICES]
    before = services.catalog.snapshot
    try:
        response = await answered
    except asyncio.CancelledError:  # the act may go on without its caller
        services.background.start(_note(route, request, context, before, CLIENT_LEFT), "noting an act")
        raise
    try:
        await services.background.complete(_note(route, request, context, before, response.status), "noting an act")
    except AdapterUnavailableError as error:
        logger.error("%s answered %d and could not be noted: %s", request.path, response.status, error)
        if response.status == _UNAVAILABLE and services.store_problem is not None:
            return response  # refused for the same cause, which it states
        return wire_error(error, context.request_id).response()
    return response


async def _note(route: Route, request: web.Request, context: RequestContext, before: Snapshot, outcome: int) -> None:
    caller = context.caller
    if caller is not None:
        note = _completed(context.audit, request, caller, before)
        act = act_of(route, request, caller, note, outcome, context.request_id)
        await request.app[SERVICES].audit.append(act)


def _completed(note: AuditNote, request: web.Request, caller: Caller, before: Snapshot) -> AuditNote:
    """The note with the fields that the handler left open, from the URL and from the catalog before the act."""
    subject = note.subject or "/".join(request.match_info.values())
    own = own_name(caller.scope, subject) if caller.scope is not None else subject
    entry = before.entries.get(split_name(subject)[0]) or before.entries.get(split_name(own)[0])
    if entry is None or (caller.scope is not None and entry.tenant != caller.scope):
        owner = note.owner or request.match_info.get("tenant", "")
        is_own = caller.scope in (None, owner)  # an attempt on another tenant's adapter is not told to that tenant
        return AuditNote(subject, owner if is_own else "", note.digest)
    return AuditNote(entry.name, note.owner or entry.tenant, note.digest or entry.default.digest)


def act_of(route: Route, request: web.Request, caller: Caller, note: AuditNote, outcome: int, request_id: str) -> Act:
    """The request in the log: its route, never its body or its query string's values beyond `version`."""
    subject = note.subject
    if version := request.query.get("version", ""):
        subject += f"@{version}"
    subject = without_secrets(subject)  # somebody may have put a whole key where its id belongs
    return Act(
        key=caller.key_id,
        tenant=caller.tenant,
        role=str(caller.role),
        action=f"{route.method} {route.path}",
        subject=subject[:_MAX_SUBJECT],
        owner=note.owner,
        digest=note.digest,
        outcome=outcome,
        request_id=request_id,
    )
