"""Where adapters are kept, and from where they may come."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from lora_serve.core.config import MAX_REGISTRATIONS
from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_texts import check_redis_prefix
from lora_serve.core.setting_types import YEAR, Paths, Texts


class RegistrySettings(SettingsGroup):
    """Where adapters are kept, and from where they may come."""

    store: Path = Field(Path("adapters_store"), description="folder of the catalog and of the adapters' weights")
    adapter_root: Paths = Field((), description="folder from which the admin may register by path; repeatable")
    lora_modules: Texts = Field((), description="NAME=SOURCE adapters to register at start; repeatable")
    adapter_url: Texts = Field(
        (), description="beginning of http(s) URLs from which the admin may register archives; repeatable"
    )
    registration_threads: int = Field(
        4, ge=1, le=MAX_REGISTRATIONS, description="adapters examined and registered at the same time, one of a tenant"
    )
    registration_seconds: float = Field(
        300.0, gt=0, le=YEAR, description="seconds of the processor that the examination of one adapter may take"
    )
    tenant_registration_seconds: float = Field(
        30.0,
        gt=0,
        le=YEAR,
        description="seconds of a minute in which a tenant registers before it comes after all others",
    )
    redis_url: str | None = Field(
        None, description="redis://host:port/db of the registry that replicas share; default: one of this server's own"
    )
    redis_prefix: str = Field("lora_serve", description="beginning of every key in Redis")
    unnamed_blob_days: float = Field(
        30.0, ge=0, le=36_500, description="days that weights which no catalog knows are kept aside; 0: for ever"
    )

    @field_validator("redis_prefix")
    @classmethod
    def _check_redis_prefix(cls, value: str) -> str:
        return check_redis_prefix(value)

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://user:password@host:port/db, rediss:// or unix://")
        return value
