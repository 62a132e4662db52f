"""The engine: batches, KV cache, scheduling and kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.extensions import AttentionName, EngineHostName, LoraKernelName, PolicyName
from lora_serve.core.setting_types import (
    MAX_COUNT,
    MAX_ROWS,
    MAX_STEP_TOKENS,
    MAX_TARGET_MS,
    MIN_TARGET_MS,
    YEAR,
    Bytes,
    Count,
    Draft,
    Gibibytes,
    SettingsGroup,
    TenantWeights,
)


class BatchSettings(SettingsGroup):
    """The size of a step, and the requests that wait for one."""

    max_num_seqs: Count = Field(64, ge=1, le=MAX_ROWS, description="rows in one step at most")
    max_num_batched_tokens: Count = Field(
        512, ge=16, le=MAX_STEP_TOKENS, description="tokens in one step at most; longer prompts run in chunks"
    )
    batch_wait_ms: float = Field(
        0.0, ge=0, le=60_000, description="milliseconds that the first waiting request waits for others; 0: none"
    )
    preferred_batch_size: int | None = Field(
        None, ge=1, le=MAX_ROWS, description="waiting requests that start a batch before --batch-wait-ms is over"
    )
    latency_target_ms: float | None = Field(
        None,
        ge=MIN_TARGET_MS,
        le=MAX_TARGET_MS,
        description="milliseconds that the p95 of time to first token may be: batches are sized for it; default: any",
    )
    inter_token_target_ms: float | None = Field(
        None,
        ge=MIN_TARGET_MS,
        le=MAX_TARGET_MS,
        description="milliseconds that the p95 of inter-token time may be: batches are sized for it; default: any",
    )
    prompt_stretch: float = Field(
        2.0,
        ge=0,
        le=1_000_000,
        description="times as long as without prompts that a step with decode rows may be, about; 0: any",
    )
    max_queue: int = Field(1024, ge=1, le=MAX_COUNT, description="waiting requests at most; more are refused with 503")
    max_queue_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="prompt tokens that wait at most; default: any number"
    )
    max_tenant_queue: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="waiting requests of one tenant at most; more are refused with 429; default: any number",
    )
    max_tenant_queue_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="prompt tokens of one tenant that wait at most; default: any number"
    )


class KVCacheSettings(SettingsGroup):
    """Memory of the KV cache, and the sharing of its blocks."""

    kv_cache_memory: Bytes | None = Field(
        None, ge=1, description="bytes of the KV cache; default: chosen from the memory that is free"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    swap_space: Gibibytes | None = Field(
        None,
        description="bytes of host memory for KV blocks of preempted requests (4: 4GiB); default: 4GiB on cuda, else 0",
    )
    memory_limit: Bytes | None = Field(
        None,
        ge=1024,
        description="bytes of device memory for weights, KV, adapters and steps; default: what is free at start",
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="part of a GPU's memory for all that --memory-limit bounds; default: what is free"
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse the KV blocks of equal beginnings of prompts, within a tenant"
    )
    share_base_prefixes: bool = Field(
        False, description="let tenants reuse one another's KV blocks of the base model alone: a prompt's timing tells"
    )


class EngineSettings(SettingsGroup):
    """The engine's process, its order of requests, its kernels."""

    engine: EngineHostName = Field(
        "thread", description="where the engine runs; process: in a child, which is started again if it crashes"
    )
    engine_step_timeout: float = Field(
        300.0,
        ge=0,
        le=YEAR,
        description="seconds without progress after which the engine counts as hung; 0: any number",
    )
    engine_max_restarts: int = Field(
        5,
        ge=0,
        le=MAX_COUNT,
        description="restarts of the engine within ten minutes, after which the server gives up and exits with 3",
    )
    policy: PolicyName = Field("fcfs", description="order of waiting requests")
    max_wait_ms: float = Field(
        10_000,
        gt=0,
        le=1000 * YEAR,
        description="milliseconds after which no policy lets anybody overtake a waiting request",
    )
    tenant_weight: TenantWeights = Field(
        (), description="TENANT=NUMBER share of a tenant under --policy fair (others: 1); repeatable"
    )
    speculate: Draft = Field(
        "auto",
        description="tokens of a row and step that may be guessed from its prompt and answer: 1 to 16; auto: as many as"
        " pay; off: none",
    )
    attention: AttentionName = Field("auto", description="paged attention; auto: the fastest that runs here")
    fuse_layers: bool = Field(True, description="fused kernels (CPU) for layers where they prove to be equal")
    lora_kernel: LoraKernelName = Field("auto", description="LoRA delta; auto: the fastest that runs here")
    cuda_graphs: bool = Field(True, description="on GPUs capture decode steps once and replay them")
    warmup: Literal["auto", "full", "off"] = Field("auto", description="work done before /ready answers 200")
