"""Bodies of the admin API: adapters, aliases, the engine's limits, tenants and keys."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from lora_serve.core.messages import Resize, Tune
from lora_serve.core.setting_groups.adapters import AdapterTierSettings
from lora_serve.core.setting_groups.engine import MIN_TARGET_MS, BatchLimits
from lora_serve.core.tenant import MAX_LIMIT, NO_LIMITS, TENANT_LIMITS, Quota, Role
from lora_serve.server.schemas.answers.base import with_fields_of
from lora_serve.server.schemas.fields import Bytes, Fields, Name, Refused, as_bytes

MAX_LABEL = 200
MAX_EXPIRY = 10 * 366 * 86400  # seconds
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]  # of a version, as its card has it
Version = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
NumBytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=0, le=MAX_LIMIT)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]


def _check_target(milliseconds: float) -> float:
    """Raises ValueError."""
    if 0 < milliseconds < MIN_TARGET_MS:
        raise ValueError(f"expected 0, or at least {MIN_TARGET_MS:g}")
    return milliseconds


_OF_TENANTS = Refused("a limit of the whole tenant: set it there", (None,))
_OF_QUOTA: dict[str, Any] = {
    field.name: NumBytes | None if "bytes" in field.name else Count | None for field in fields(Quota)
}


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
    def quota(self, old: Quota = NO_LIMITS) -> Quota:
        """The limits as a Quota. `old`: holds for those that were not named."""
        return replace(old, **{name: getattr(self, name) for name in self.model_fields_set})


@with_fields_of(Quota, default=None, **_OF_QUOTA)
class QuotaFields(_Limits):
    """Limits of a tenant or a key; one that is left out, or null, is no limit."""


@with_fields_of(Quota, default=None, **_OF_QUOTA | dict.fromkeys(TENANT_LIMITS, Annotated[Any, _OF_TENANTS]))
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
