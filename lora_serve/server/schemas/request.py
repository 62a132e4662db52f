"""The fields of every inference request: the adapters that answer it, and its urgency."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lora_serve.server.schemas.fields import Fields, Name, User, without_null

MAX_ADAPTERS = 8  # composed in one request
MAX_SCALE = 100.0
DAY_MS = 24 * 3600 * 1000


class AdapterScale(Fields):
    """One element of `adapters`. Its deltas count `scale` times; a negative scale takes them away."""

    id: Name
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE)


AdapterScales = Annotated[
    list[Annotated[AdapterScale, BeforeValidator(without_null)]], Field(min_length=1, max_length=MAX_ADAPTERS)
]


class NamingFields(Fields):
    """The names in a request: of the model, and of the adapters on it."""

    model: Name | None = None
    adapters: AdapterScales | None = None
    adapter_id: Name | None = None
    user: User = None  # the end user: with the tenant, who always gets the same side of a canary


class RequestFields(NamingFields):
    """The base of inference requests."""

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout_ms: int | None = Field(None, ge=1, le=DAY_MS)
    max_cold_wait_ms: int | None = Field(None, ge=0, le=DAY_MS)
    on_cold: Literal["wait", "base", "previous", "fail"] = "wait"
