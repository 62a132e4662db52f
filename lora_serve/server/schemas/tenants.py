"""Bodies of /admin/tenants and of the keys below it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from lora_serve.core.tenant import MAX_LIMIT, Quota, Role
from lora_serve.server.schemas.fields import Fields, Name, as_bytes

MAX_LABEL = 200
MAX_EXPIRY = 10 * 366 * 86400  # seconds
Count = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
NumBytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=0, le=MAX_LIMIT)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]


class QuotaFields(Fields):
    """Each may be left out, or null: no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_running: Count | None = None
    max_queued: Count | None = None
    max_adapters: Count | None = None
    max_stored_bytes: NumBytes | None = None
    device_bytes_guaranteed: NumBytes | None = None
    device_bytes_max: NumBytes | None = None
    registrations_per_minute: Count | None = None

    def quota(self, old: Quota | None = None) -> Quota:
        """`old`: what holds for the limits that were not named."""
        named = {name: getattr(self, name) for name in self.model_fields_set}
        kept = {} if old is None else {name: getattr(old, name) for name in QuotaFields.model_fields}
        return Quota(**{**kept, **named})


class CreateTenantFields(Fields):
    """POST /admin/tenants"""

    name: Name
    may_use_base: bool = True
    quota: QuotaFields = QuotaFields()


class ChangeTenantFields(Fields):
    """PATCH /admin/tenants/{tenant}; what is left out stays as it is."""

    may_use_base: bool | None = None
    quota: QuotaFields = QuotaFields()


class CreateKeyFields(Fields):
    """POST /admin/tenants/{tenant}/keys"""

    role: Annotated[Role, Field(strict=False)] = Role.INFERENCE
    label: Label = ""
    expires_in: Annotated[int, Field(ge=1, le=MAX_EXPIRY)] | None = None  # seconds
    quota: QuotaFields = QuotaFields()


class SharingFields(Fields):
    """PUT /admin/adapters/{id}/sharing; "*" shares with all."""

    shared_with: Annotated[list[Name], Field(max_length=1000)]
