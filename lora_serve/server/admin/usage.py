"""GET /admin/usage: what was metered, summed as the caller asks, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.tenant import Caller
from lora_serve.server.context import CONTEXT
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.metering import summed
from lora_serve.tenancy.usage import FIGURES, KEY_FIELDS, UsageKey, UsageRow

DAY = 86_400
DEFAULT_BY = ("tenant", "adapter", "version", "key")
GROUPS = (*KEY_FIELDS, "time", "day")
_FOREVER = 2**40  # Unix seconds


async def get_usage(request: web.Request) -> web.StreamResponse:
    """?tenant=&adapter=&key=&from=&to=&by=&format= ; a tenant-admin sees its own tenant's."""
    services, query = request.app[SERVICES], request.query
    caller = request[CONTEXT].caller
    assert caller is not None, "the route stands behind a guard of middleware.py"
    by = _groups(query.get("by"))
    start, end = _whole(_time(query, "from", 0), _time(query, "to", _FOREVER), services.meter.config.bucket_seconds)
    rows, is_complete = await services.meter.rows(start, end)
    wanted = {"tenant": _tenant(caller, query.get("tenant"))}
    wanted |= {name: query.get(name) for name in ("adapter", "version", "key")}
    data = _table([row for row in rows if _matches(row[1], wanted)], by)
    if _wants_csv(request):
        return web.Response(text=_csv(data, by), content_type="text/csv", charset="utf-8")
    shown_end = None if end >= _FOREVER else end
    return web.json_response(
        {"object": "list", "data": data, "from": start, "to": shown_end, "by": list(by), "is_complete": is_complete}
    )


def _tenant(caller: Caller, asked: str | None) -> str | None:
    """Whose usage: None is everybody's. Somebody else's is empty, as if there were none."""
    if caller.sees_all:
        return asked
    return caller.tenant if asked in (None, caller.tenant) else ""


def _matches(key: UsageKey, wanted: dict[str, str | None]) -> bool:
    return all(value is None or getattr(key, name) == value for name, value in wanted.items())


def _table(rows: Sequence[UsageRow], by: tuple[str, ...]) -> list[dict[str, Any]]:
    sums = summed(rows, _grouper(by))
    return [dict(zip(by, group, strict=True)) | asdict(figures) for group, figures in sums.items()]


def _grouper(by: tuple[str, ...]) -> Callable[[int, UsageKey], tuple[str, ...]]:
    def group(bucket: int, key: UsageKey) -> tuple[str, ...]:
        return tuple(_value(name, bucket, key) for name in by)

    return group


def _value(name: str, bucket: int, key: UsageKey) -> str:
    if name == "time":
        return datetime.fromtimestamp(bucket, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if name == "day":
        return datetime.fromtimestamp(bucket, UTC).strftime("%Y-%m-%d")
    return str(getattr(key, name))


def _groups(text: str | None) -> tuple[str, ...]:
    if text is None:
        return DEFAULT_BY
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in GROUPS:
            raise InvalidRequestError(f"`by` must be some of {', '.join(GROUPS)}, separated by commas.", param="by")
    return names


def _whole(start: int, end: int, bucket: int) -> tuple[int, int]:
    """The range in whole buckets, wider rather than narrower."""
    if start > end:
        raise InvalidRequestError("`from` must not be after `to`.", param="from")
    return start // bucket * bucket, min(_FOREVER, -(-end // bucket) * bucket)


def _time(query: Any, name: str, default: int) -> int:
    """Unix seconds, or a date or time as ISO 8601 has it (UTC unless it says otherwise)."""
    text = query.get(name)
    if text is None or text == "":
        return default
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return min(int(text), _FOREVER)
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # an unquoted "+" in a URL
        return max(0, int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError):
        message = f"`{name}` must be Unix seconds or a date such as 2031-05-01T00:00:00Z."
        raise InvalidRequestError(message, param=name) from None


def _wants_csv(request: web.Request) -> bool:
    form = request.query.get("format")
    if form is not None and form not in ("json", "csv"):
        raise InvalidRequestError("`format` must be json or csv.", param="format")
    return form == "csv" or (form is None and "text/csv" in request.headers.get("Accept", ""))


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
