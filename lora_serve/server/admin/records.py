"""GET /admin/audit: the admin acts, newest first; GET /admin/usage: the metered usage, summed as the caller asks."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, cast

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.tenant import ADMIN_CALLER, Caller
from lora_serve.server.admin.answers import AuditPage, UsageTable
from lora_serve.server.admin.protocol import FOREVER, AuditQuery, UsageQuery
from lora_serve.server.answers import json_answer, json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_query
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.audit_journal import AuditLine
from lora_serve.tenancy.metering import summed
from lora_serve.tenancy.usage import FIGURES, KEY_FIELDS, UsageFigures, UsageKey, UsageRow


async def get_audit(request: web.Request) -> web.StreamResponse:
    """Show the audit log.

    `after`: the `last_id` of the page before. A tenant-admin sees its own tenant's acts.
    """
    services, caller, query = request.app[SERVICES], request[CONTEXT].known_caller, check_query(AuditQuery, request)
    scopes = tuple(name for name in (caller.scope, query.tenant) if name is not None)
    named = tuple(json.dumps(scope) for scope in scopes)  # as it stands in a line: most lines need not be parsed
    # Older acts are those of an earlier tenant of the same name.
    since_ms = 0 if caller.scope is None else int(1000 * caller.since)

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


async def get_usage(request: web.Request) -> web.StreamResponse:
    """Show usage.

    A tenant-admin sees its own tenant's.
    """
    services, caller, query = request.app[SERVICES], request[CONTEXT].known_caller, check_query(UsageQuery, request)
    start, end = _whole(query, services.meter.config.usage_bucket_seconds)
    tenant = _tenant(caller, query.tenant)
    rows, is_complete = await services.meter.rows(start, end, tenant)
    wanted = query.model_dump(include=set(KEY_FIELDS) - {"tenant"})

    def table() -> list[dict[str, Any]]:
        found = [row for row in rows if _matches(row[1], wanted)]
        return _table(found if caller.sees_all else _since_it_was_made(services, caller, found), query.by)

    reads = services.meter.long_reads
    by, data = query.by, await reads.run(table)  # a year of many tenants takes seconds
    if query.format == "csv" or (query.format is None and "text/csv" in request.headers.get("Accept", "")):
        return web.Response(text=await reads.run(lambda: _csv(data, by)), content_type="text/csv", charset="utf-8")
    shown_end = None if end >= FOREVER else end
    rows_shown = cast(list[UsageFigures], data)  # beside the fields of `by`
    body = UsageTable(data=rows_shown, start=start, end=shown_end, by=by, is_complete=is_complete)
    return await json_answer(request, lambda: body, len(data) * (len(by) + len(FIGURES)))


def _tenant(caller: Caller, asked: str | None) -> str | None:
    """The tenant whose usage is shown; None: all. Another tenant's is empty to a tenant, as if there were none."""
    if caller.sees_all:
        return asked
    return caller.tenant if asked in (None, caller.tenant) else ""


def _since_it_was_made(services: Services, caller: Caller, rows: Sequence[UsageRow]) -> list[UsageRow]:
    """The rows without those of an earlier tenant of the same name. In a bucket that may hold both, a row is told by
    its key or, for residency and the admin key, by the content that the tenant has.
    """
    size = services.meter.config.usage_bucket_seconds
    first = int(caller.since // size) * size
    keys = {key.id for key in services.keys.directory.snapshot.keys_of(caller.tenant)}
    entries = services.catalog.snapshot.entries.values()
    digests = {version.digest for entry in entries if entry.tenant == caller.tenant for version in entry.versions}

    def is_own(key: UsageKey) -> bool:
        return key.key in keys or (key.key in ("", ADMIN_CALLER.key_id) and key.digest in digests)

    return [row for row in rows if row[0] > first or (row[0] == first and is_own(row[1]))]


def _matches(key: UsageKey, wanted: dict[str, str | None]) -> bool:
    return all(value is None or getattr(key, name) == value for name, value in wanted.items())


def _table(rows: Sequence[UsageRow], by: tuple[str, ...]) -> list[dict[str, Any]]:
    sums = summed(rows, lambda bucket, key: tuple(_value(name, bucket, key) for name in by))
    return [dict(zip(by, group, strict=True)) | asdict(figures) for group, figures in sums.items()]


def _value(name: str, bucket: int, key: UsageKey) -> str:
    if name == "time":
        return datetime.fromtimestamp(bucket, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if name == "day":
        return datetime.fromtimestamp(bucket, UTC).strftime("%Y-%m-%d")
    return str(getattr(key, name))


def _whole(query: UsageQuery, bucket: int) -> tuple[int, int]:
    """The range in whole buckets, wider rather than narrower. Raises InvalidRequestError."""
    if query.start > query.end:
        raise InvalidRequestError("`from` must not be after `to`.", param="from")
    return query.start // bucket * bucket, min(FOREVER, -(-query.end // bucket) * bucket)


def _csv(data: Iterable[dict[str, Any]], by: tuple[str, ...]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, [*by, *FIGURES], lineterminator="\r\n")
    writer.writeheader()
    for row in data:
        writer.writerow({name: _harmless(value) for name, value in row.items()})
    return file.getvalue()


def _harmless(value: Any) -> Any:
    """A spreadsheet must not take a name for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
