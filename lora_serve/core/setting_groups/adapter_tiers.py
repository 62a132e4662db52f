"""How many adapters, and how many bytes of them, each tier holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import MAX_COUNT, YEAR, Bytes


class AdapterTierSettings(SettingsGroup):
    """How many adapters, and how many bytes of them, each tier holds."""

    max_loras: int = Field(16, ge=1, le=16_384, description="adapters resident on the device at most (slots)")
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
