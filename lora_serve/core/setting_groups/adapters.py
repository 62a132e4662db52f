"""Adapters: the tiers that hold them, the registry that names them, and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from lora_serve.core.adapter import check_new_adapter_id
from lora_serve.core.config import MAX_REGISTRATIONS
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_texts import check_redis_prefix
from lora_serve.core.setting_types import MAX_COUNT, MAX_SLOTS, YEAR, Bytes, Modules, Paths, SettingsGroup, Texts


class AdapterTierSettings(SettingsGroup):
    """The tiers: how many adapters, and how many bytes of them, each holds."""

    max_loras: int = Field(16, ge=1, le=MAX_SLOTS, description="adapters resident on the device at most (slots)")
    max_lora_rank: int = Field(512, ge=1, le=1024, description="largest rank that may be registered")
    max_cpu_loras: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="adapters kept in host memory at most; default: by bytes only"
    )
    adapter_memory: Bytes | None = Field(
        None, description="bytes of adapters on the device at most; default: by --max-loras only"
    )
    adapter_host_memory: Bytes = Field(2 * 2**30, description="bytes of adapters in host memory at most")
    adapter_disk_memory: Bytes | None = Field(
        None, description="bytes of adapters on the local disk at most; with --redis-url a cache, else what may be kept"
    )
    adapter_eviction: Literal["cost", "lru"] = Field(
        "cost", description="who leaves a full tier: cost weighs use, size and time to reload; lru the last use only"
    )
    adapter_tenant_floor: float = Field(
        0.5, ge=0, le=1, description="part of a tenant's equal share of a tier that other tenants cannot push out"
    )
    adapter_load_threads: int = Field(2, ge=1, le=64, description="adapters read at the same time")
    adapter_load_timeout: float = Field(
        60.0,
        gt=0,
        le=YEAR,
        description="seconds after which a load of an adapter hangs: 503, and another thread takes its place",
    )


class RegistrySettings(SettingsGroup):
    """The registry: where adapters are kept, and from where they may come."""

    store: Path = Field(Path("adapters_store"), description="folder of the catalog and of the adapters' weights")
    adapter_root: Paths = Field((), description="folder from which the admin may register by path; repeatable")
    lora_modules: Modules = Field(
        (), description="NAME=SOURCE adapters to register at start, or vLLM's JSON; repeatable"
    )
    adapter_url: Texts = Field(
        (), description="beginning of http(s) URLs from which the admin may register archives; repeatable"
    )
    adapter_url_inner: bool = Field(
        False, description="names in --adapter-url may mean private addresses and this machine; written addresses do"
    )
    adapter_chat_templates: Literal["admin", "tenant", "off"] = Field(
        "admin",
        description="adapters' own chat templates that are used: those the admin key registered, tenants' too, or none",
    )
    registration_threads: int = Field(
        4, ge=1, le=MAX_REGISTRATIONS, description="adapters examined and registered at the same time, one of a tenant"
    )
    registration_seconds: float = Field(
        300.0, gt=0, le=YEAR, description="seconds of the processor that the validation of one adapter may take"
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

    @field_validator("lora_modules")
    @classmethod
    def _check_lora_modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            name, equals, path = item.partition("=")
            if not equals or not path:
                raise ValueError("expected NAME=PATH")
            try:
                check_new_adapter_id(name)
            except InvalidRequestError as error:
                raise ValueError(f"{item!r}: {error}") from None
        return value
