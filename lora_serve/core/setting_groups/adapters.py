"""Adapters: the tiers that hold them, the registry that names them, and their sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from lora_serve.core.adapter import check_new_adapter_id
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_texts import check_redis_prefix
from lora_serve.core.setting_types import (
    MAX_COUNT,
    MAX_REGISTRATIONS,
    YEAR,
    Bytes,
    Modules,
    Paths,
    Texts,
    setting,
)


def _check_redis_url(value: str | None) -> str | None:
    if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("expected redis://user:password@host:port/db, rediss:// or unix://")
    return value


def _check_lora_modules(value: tuple[str, ...]) -> tuple[str, ...]:
    for item in value:
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise ValueError("expected NAME=PATH")
        try:
            check_new_adapter_id(name)
        except InvalidRequestError as error:
            raise ValueError(f"{item!r}: {error}") from None
    return value


@dataclass(frozen=True, kw_only=True)
class AdapterTierSettings:
    """The tiers: how many adapters, and how many bytes of them, each holds."""

    max_loras: int = setting(16, "adapters resident on the device at most (slots)", ge=1, le=16_384)
    max_lora_rank: int = setting(512, "largest rank that may be registered", ge=1, le=1024)
    max_cpu_loras: int | None = setting(
        None, "adapters kept in host memory at most; default: by bytes only", ge=1, le=MAX_COUNT
    )
    adapter_memory: Bytes | None = setting(
        None, "bytes of adapters on the device at most; default: by --max-loras only"
    )
    adapter_host_memory: Bytes = setting(2 * 2**30, "bytes of adapters in host memory at most")
    adapter_disk_memory: Bytes | None = setting(
        None, "bytes of adapters on the local disk at most; with --redis-url a cache, else what may be kept"
    )
    adapter_eviction: Literal["cost", "lru"] = setting(
        "cost", "who leaves a full tier: cost weighs use, size and time to reload; lru the last use only"
    )
    adapter_tenant_floor: float = setting(
        0.5, "part of a tenant's equal share of a tier that other tenants cannot push out", ge=0, le=1
    )
    adapter_load_threads: int = setting(2, "adapters read at the same time", ge=1, le=64)
    adapter_load_timeout: float = setting(
        60.0, "seconds after which a load of an adapter hangs: 503, and another thread takes its place", gt=0, le=YEAR
    )


@dataclass(frozen=True, kw_only=True)
class RegistrySettings:
    """The registry: where adapters are kept, and from where they may come."""

    store: Path = setting(Path("adapters_store"), "folder of the catalog and of the adapters' weights")
    adapter_root: Paths = setting((), "folder from which the admin may register by path; repeatable")
    lora_modules: Annotated[Modules, AfterValidator(_check_lora_modules)] = setting(
        (), "NAME=SOURCE adapters to register at start, or vLLM's JSON; repeatable"
    )
    adapter_url: Texts = setting((), "beginning of http(s) URLs from which the admin may register archives; repeatable")
    adapter_url_inner: bool = setting(
        False, "names in --adapter-url may mean private addresses and this machine; written addresses do"
    )
    adapter_chat_templates: Literal["admin", "tenant", "off"] = setting(
        "admin", "adapters' own chat templates that are used: those the admin key registered, tenants' too, or none"
    )
    registration_threads: int = setting(
        4, "adapters examined and registered at the same time, one of a tenant", ge=1, le=MAX_REGISTRATIONS
    )
    registration_seconds: float = setting(
        300.0, "seconds of the processor that the validation of one adapter may take", gt=0, le=YEAR
    )
    tenant_registration_seconds: float = setting(
        30.0, "seconds of a minute in which a tenant registers before it comes after all others", gt=0, le=YEAR
    )
    redis_url: Annotated[str | None, AfterValidator(_check_redis_url)] = setting(
        None, "redis://host:port/db of the registry that replicas share; default: one of this server's own"
    )
    redis_prefix: Annotated[str, AfterValidator(check_redis_prefix)] = setting(
        "lora_serve", "beginning of every key in Redis"
    )
    unnamed_blob_days: float = setting(
        30.0, "days that weights which no catalog knows are kept aside; 0: for ever", ge=0, le=36_500
    )
