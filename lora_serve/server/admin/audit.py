"""GET /admin/audit: who did what, newest first."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.admin.query import limit_in
from lora_serve.server.context import CONTEXT
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.audit_journal import AuditLine

_ID = re.compile(r"\d{14}-[0-9A-Za-z]{1,8}-\d{9,18}\Z")


async def get_audit(request: web.Request) -> web.StreamResponse:
    """?limit=&after=&tenant= ; `after`: the `last_id` of the page before. A tenant-admin sees its own tenant's acts."""
    services, query = request.app[SERVICES], request.query
    caller, after = request[CONTEXT].caller, query.get("after")
    assert caller is not None, "the route stands behind a guard of middleware.py"
    if after is not None and not _ID.match(after):
        raise InvalidRequestError("`after` must be the `last_id` of an earlier answer.", param="after")
    scopes = tuple(name for name in (caller.scope, query.get("tenant")) if name is not None)

    def matches(line: AuditLine) -> bool:
        act = line.act
        return all(scope in (act["tenant"], act["owner"]) for scope in scopes)

    page = await services.audit.page(limit_in(request), after, matches)
    return web.json_response(
        {
            "object": "list",
            "data": [_shown(line) for line in page.lines],
            "has_more": page.has_more,
            "last_id": page.lines[-1].id if page.lines else None,
            "is_complete": page.is_complete,
        }
    )


def _shown(line: AuditLine) -> dict[str, Any]:
    act = line.act
    act["time"] = act.pop("time_ms") / 1000
    return {"id": line.id, "replica": line.replica, "number": line.number, **act, "line_digest": line.digest}
