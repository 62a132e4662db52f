"""Memory of the KV cache, and who finds whose blocks."""

from __future__ import annotations

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import Bytes


class KVCacheSettings(SettingsGroup):
    """Memory of the KV cache, and who finds whose blocks."""

    kv_cache_memory: Bytes | None = Field(
        None, ge=1, description="bytes of the KV cache; default: chosen from the memory that is free"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    swap_space: Bytes | None = Field(
        None, description="bytes of host memory for KV blocks of preempted requests; default: 4GiB on cuda, else 0"
    )
    memory_limit: Bytes | None = Field(
        None,
        ge=1024,
        description="bytes of device memory for weights, KV, adapters and steps; default: what is free at start",
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse the KV blocks of equal beginnings of prompts, within a tenant"
    )
    share_base_prefixes: bool = Field(
        False, description="let tenants reuse one another's KV blocks of the base model alone: a prompt's timing tells"
    )
