"""Bodies and queries of the admin API, and the form fields of an upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model, model_validator

from lora_serve.core.adapter import AdapterState
from lora_serve.core.errors import did_you_mean
from lora_serve.core.messages import Resize, Tune
from lora_serve.core.setting_groups.adapters import AdapterTierSettings
from lora_serve.core.setting_groups.engine import MIN_TARGET_MS, BatchLimits
from lora_serve.core.tenant import MAX_LIMIT, NO_LIMITS, TENANT_LIMITS, Quota, Role
from lora_serve.server.schemas.fields import Bytes, Fields, Name, Refused, as_bytes
from lora_serve.tenancy.usage import KEY_FIELDS

MAX_LABEL = 200
MAX_EXPIRY = 10 * 366 * 86400  # seconds
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]  # of a version, as its card has it
Version = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
NumBytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=0, le=MAX_LIMIT)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
_OF_TENANTS = Refused("a limit of the whole tenant: set it there", (None,))
_OF_QUOTA: dict[str, Any] = {
    field.name: NumBytes | None if "bytes" in field.name else Count | None for field in fields(Quota)
}
DEFAULT_LIMIT = 100
MAX_PAGE = 1000
MAX_SEARCH = 500  # characters
GROUPS = (*KEY_FIELDS, "time", "day")
FOREVER = 2**40  # Unix seconds


def _check_target(milliseconds: float) -> float:
    """Raises ValueError."""
    if 0 < milliseconds < MIN_TARGET_MS:
        raise ValueError(f"expected 0, or at least {MIN_TARGET_MS:g}")
    return milliseconds


class RegisterFields(Fields):
    """POST /admin/adapters"""

    id: Name
    source: str
    tenant: Name | None = None
    pin: bool = False
    metadata: dict[str, Any] | None = None
    allow_noop: bool = False
    activate: bool = True  # the bare id means this version from now on
    digest: Digest | None = None  # that the version must come to have; any other content is refused


class MetadataFields(Fields):
    """PATCH /admin/adapters/{id}; `metadata` takes the place of all that was there."""

    metadata: dict[str, Any]


class CanaryFields(Fields):
    """The version that answers `percent` of the requests."""

    version: Version
    percent: float = Field(ge=0, le=100)


class RouteFields(Fields):
    """PUT /admin/adapters/{id}/route"""

    version: Version | None = None
    canary: CanaryFields | None = None


class AliasFields(Fields):
    """PUT /admin/aliases/{alias}"""

    target: Name


def _bounded(name: str) -> Any:
    """The type of a limit, with its setting's bounds."""
    setting = next(field for field in (*fields(AdapterTierSettings), *fields(BatchLimits)) if field.name == name)
    bounds = {key: bound for key, bound in setting.metadata.items() if key in ("ge", "le")}
    if not bounds:
        return Bytes | None
    if name in Tune.MAY_BE_OFF:
        bounds["ge"] = 0
    if name.endswith("_target_ms"):
        return Annotated[float, Field(**bounds), AfterValidator(_check_target)] | None
    return Annotated[float if name.endswith("_ms") else int, Field(**bounds)] | None


_LIMITS: dict[str, Any] = {
    name: (_bounded(name), None) for name in (*Resize.__struct_fields__, *Tune.__struct_fields__)
}


LimitFields = create_model(
    "LimitFields",
    __base__=Fields,
    __module__=__name__,
    __doc__="PUT /admin/engine; what is left out stays as it is. Names and bounds are the flags'; "
    "0, or null: no target",
    **_LIMITS,
)


class LoadLoraFields(Fields):
    """POST /v1/load_lora_adapter, as vLLM has it"""

    lora_name: Name = ""
    lora_path: str = ""
    load_inplace: bool = False
    allow_noop: bool = False  # our own


class UnloadLoraFields(Fields):
    """POST /v1/unload_lora_adapter, as vLLM has it"""

    lora_name: Name = ""


class _Limits(Fields):
    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:  # a limit that is mistyped would be none
                raise ValueError(f"there is no limit {name[:64]!r}{did_you_mean(name, cls.model_fields)}")
        return value

    def quota(self, old: Quota = NO_LIMITS) -> Quota:
        """The limits as a Quota. `old`: holds for those that were not named."""
        return replace(old, **{name: getattr(self, name) for name in self.model_fields_set})


def _with_limits(types: dict[str, Any]) -> Callable[[type[_Limits]], Any]:
    """Decorates a schema: it has these limits, each of which may be left out."""
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    return lambda schema: create_model(
        schema.__name__, __base__=schema, __module__=__name__, __doc__=schema.__doc__, **fields
    )


@_with_limits(_OF_QUOTA)
class QuotaFields(_Limits):
    """Limits of a tenant or a key; one that is left out, or null, is no limit."""


@_with_limits(_OF_QUOTA | dict.fromkeys(TENANT_LIMITS, Annotated[Any, _OF_TENANTS]))
class KeyQuotaFields(_Limits):
    """Limits of a key, which hold beside those of its tenant."""


class CreateTenantFields(Fields):
    """POST /admin/tenants"""

    name: Name
    may_use_base: bool = True
    offload: bool = True
    quota: QuotaFields = QuotaFields()


class ChangeTenantFields(Fields):
    """PATCH /admin/tenants/{tenant}; what is left out stays as it is."""

    may_use_base: bool | None = None
    offload: bool | None = None
    quota: QuotaFields = QuotaFields()


class CreateKeyFields(Fields):
    """POST /admin/tenants/{tenant}/keys"""

    role: Annotated[Role, Field(strict=False)] = Role.INFERENCE
    label: Label = ""
    expires_in: Annotated[int, Field(ge=1, le=MAX_EXPIRY)] | None = None  # seconds
    quota: KeyQuotaFields = KeyQuotaFields()


class SharingFields(Fields):
    """PUT /admin/adapters/{id}/sharing; "*" shares with all."""

    shared_with: Annotated[list[Name], Field(max_length=1000)]


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

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = DEFAULT_LIMIT
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
