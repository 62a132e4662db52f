"""The queries of the admin API, and the form fields of an upload."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from lora_serve.core.adapter import AdapterState
from lora_serve.server.schemas.admin import Digest
from lora_serve.server.schemas.fields import Fields, Name
from lora_serve.tenancy.usage import KEY_FIELDS

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_SEARCH = 500  # characters
GROUPS = (*KEY_FIELDS, "time", "day")
FOREVER = 2**40  # Unix seconds


class Query(Fields):
    """The base of all queries. Types are not strict, as all of a query is text."""

    model_config = ConfigDict(strict=False)


def as_moment(text: str) -> int:
    """Unix seconds, or a date or time as ISO 8601 has it (UTC unless it says otherwise). Raises ValueError."""
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return min(int(text), FOREVER)
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # an unquoted "+" in a URL
        return max(0, int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError):
        raise ValueError("must be Unix seconds or a date such as 2031-05-01T00:00:00Z") from None


def as_groups(value: str) -> tuple[str, ...]:
    """Names with commas between them -> names, each once. Raises ValueError."""
    groups = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not set(groups) <= set(GROUPS):
        raise ValueError(f"must be some of {', '.join(GROUPS)}, separated by commas")
    return groups


Moment = Annotated[int, BeforeValidator(as_moment), WithJsonSchema({"type": "string"})]
Groups = Annotated[tuple[str, ...], BeforeValidator(as_groups), WithJsonSchema({"type": "string"})]


class PageQuery(Query):
    """`after`: the `last_id` of the page before."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    after: str | None = None


class AdaptersQuery(PageQuery):
    """GET /admin/adapters"""

    tenant: str | None = None
    state: AdapterState | None = None
    search: Annotated[str, Field(max_length=MAX_SEARCH)] = ""
    sort: Literal["name", "bytes", "rank", "created", "last_used", "requests"] = "name"
    order: Literal["asc", "desc"] | None = None
    offset: Annotated[int, Field(ge=0, lt=10**9)] = 0
    fields: Literal["card", "summary"] = "card"

    @property
    def is_descending(self) -> bool:
        """True if the largest come first, as they do unless names are ordered."""
        return (self.order or ("asc" if self.sort == "name" else "desc")) == "desc"

    @property
    def is_by_name(self) -> bool:
        """True for the order that the catalog has anyway."""
        return self.sort == "name" and not self.is_descending


class AuditQuery(PageQuery):
    """GET /admin/audit"""

    after: Annotated[str, Field(pattern=r"^\d{14}-[0-9A-Za-z]{1,8}-\d{9,18}$")] | None = None
    tenant: str | None = None


class UsageQuery(Query):
    """GET /admin/usage; the moments are Unix seconds."""

    tenant: str | None = None
    adapter: str | None = None
    version: str | None = None
    key: str | None = None
    start: Annotated[Moment, Field(alias="from")] = 0
    end: Annotated[Moment, Field(alias="to")] = FOREVER
    by: Groups = ("tenant", "adapter", "version", "key")
    format: Literal["json", "csv"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty_is_open(cls, query: dict[str, str]) -> dict[str, str]:
        """An empty bound, as forms send it (`?from=&to=`), is none."""
        return {name: text for name, text in query.items() if text or name not in ("from", "to")}


class FleetQuery(Query):
    """GET /admin/fleet; `adapter`: an id, or the digest of a version."""

    adapter: str | None = None


class StreamQuery(Query):
    """GET /admin/engine/stream; `rate`: frames per second, at most."""

    rate: Annotated[int, Field(ge=1, le=10)] = 5


class DeletionQuery(Query):
    """DELETE /admin/adapters/{id}"""

    version: Annotated[int, Field(ge=0, lt=10**9)] | None = None


class UploadFields(Query):
    """PUT /admin/adapters/{id}, in the form or behind the `?`."""

    tenant: Name | None = None
    pin: bool = False
    metadata: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})] | None = None
    allow_noop: bool = False
    activate: bool = True
    digest: Digest | None = None
