"""GET /admin/audit: the admin acts, newest first."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from lora_serve.server.answers.json_answer import json_response
from lora_serve.server.bodies.json_body import check_query
from lora_serve.server.context import CONTEXT
from lora_serve.server.schemas.answers.tenancy import AuditPage
from lora_serve.server.schemas.queries import AuditQuery
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.audit_journal import AuditLine


async def get_audit(request: web.Request) -> web.StreamResponse:
    """Show the audit log.

    `after`: the `last_id` of the page before. A tenant-admin sees its own tenant's acts.
    """
    services, caller, query = request.app[SERVICES], request[CONTEXT].known_caller, check_query(AuditQuery, request)
    scopes = tuple(name for name in (caller.scope, query.tenant) if name is not None)
    named = tuple(json.dumps(scope) for scope in scopes)  # as it stands in a line: most lines need not be parsed

    since_ms = (
        0 if caller.scope is None else int(1000 * caller.since)
    )  # older acts are those of an earlier tenant of the same name

    def matches(line: AuditLine) -> bool:
        if line.time_ms < since_ms or not all(name in line.line for name in named):
            return False
        act = line.act
        return all(scope in (act["tenant"], act["owner"]) for scope in scopes)

    page = await services.audit.page(query.limit, query.after, matches)
    return json_response(
        AuditPage(
            data=[_shown(line) for line in page.lines],
            has_more=page.has_more,
            last_id=page.lines[-1].id if page.lines else None,
            is_complete=page.is_complete,
        )
    )


def _shown(line: AuditLine) -> Any:
    act = line.act
    act["time"] = act.pop("time_ms") / 1000
    return {"id": line.id, "replica": line.replica, "number": line.number, **act, "line_digest": line.digest}
