"""The engine: batches, KV cache, scheduling and kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator

from lora_serve.core.setting_types import (
    MAX_COUNT,
    YEAR,
    AttentionName,
    Bytes,
    Draft,
    EngineHostName,
    Gibibytes,
    HumanInt,
    LoraKernelName,
    PolicyName,
    TenantWeights,
    Texts,
    setting,
)

_MAX_ROWS = 4096  # of one step
MIN_TARGET_MS, _MAX_TARGET_MS = 0.001, 1000.0 * YEAR


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Limits of a batch's start and size, which may be changed while the server runs."""

    max_num_seqs: HumanInt = setting(64, "rows in one step at most", on_cuda=256, ge=1, le=_MAX_ROWS)
    max_num_batched_tokens: HumanInt = setting(
        512, "tokens in one step at most; longer prompts run in chunks", on_cuda=2048, ge=16, le=2**20
    )
    batch_wait_ms: float = setting(
        0.0, "milliseconds that the first waiting request waits for others; 0: none", ge=0, le=60_000
    )
    preferred_batch_size: int | None = setting(
        None, "waiting requests that start a batch before --batch-wait-ms is over", ge=1, le=_MAX_ROWS
    )
    latency_target_ms: float | None = setting(
        None,
        "milliseconds that the p95 of time to first token may be: batches are sized for it; default: any",
        ge=MIN_TARGET_MS,
        le=_MAX_TARGET_MS,
    )
    inter_token_target_ms: float | None = setting(
        None,
        "milliseconds that the p95 of inter-token time may be: batches are sized for it; default: any",
        ge=MIN_TARGET_MS,
        le=_MAX_TARGET_MS,
    )
    prompt_stretch: float = setting(
        2.0, "times as long as without prompts that a step with decode rows may be, about; 0: any", ge=0, le=1_000_000
    )

    @property
    def batch_wait(self) -> float:
        """Seconds from the first waiting request; 0: a batch never waits."""
        return self.batch_wait_ms / 1000

    @property
    def ttft_target(self) -> float | None:
        """Seconds, of the p95 of time to first token; None: nothing is adapted."""
        return None if self.latency_target_ms is None else self.latency_target_ms / 1000

    @property
    def itl_target(self) -> float | None:
        """Seconds, likewise of inter-token time."""
        return None if self.inter_token_target_ms is None else self.inter_token_target_ms / 1000


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The most that may wait before requests are refused; None: as many as the other limits allow."""

    max_queue: int = setting(1024, "waiting requests at most; more are refused with 503", ge=1, le=MAX_COUNT)
    max_queue_tokens: int | None = setting(
        None, "prompt tokens that wait at most; default: any number", ge=1, le=MAX_COUNT
    )
    max_tenant_queue: int | None = setting(
        None,
        "waiting requests of one tenant at most; more are refused with 429; default: any number",
        ge=1,
        le=MAX_COUNT,
    )
    max_tenant_queue_tokens: int | None = setting(
        None, "prompt tokens of one tenant that wait at most; default: any number", ge=1, le=MAX_COUNT
    )

    def times(self, count: int) -> QueueLimits:
        """The limits of so many engines together."""
        return replace(self, **{name: count * limit for name, limit in asdict(self).items() if limit is not None})


class BatchSettings(QueueLimits, BatchLimits):
    """The size of a step, and the requests that wait for one."""


def _read_kv_dtype(value: object) -> object:
    vllm = {"fp8": "fp8_e4m3", "fp8_per_token_head": "fp8_e4m3", "int8_per_token_head": "int8"}  # vLLM's other names
    return vllm.get(str(value), value)


@dataclass(frozen=True, kw_only=True)
class KVCacheSettings:
    """Memory of the KV cache, and the sharing of its blocks."""

    kv_cache_memory: Bytes | None = setting(
        None, "bytes of the KV cache; default: chosen from the memory that is free", ge=1
    )
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8_e4m3"], BeforeValidator(_read_kv_dtype)] = setting(
        "auto",
        "how K and V are stored: as the model's own type, or in one byte a number with a scale of each token and head",
    )
    block_size: int = setting(16, "tokens per KV block", ge=1, le=256)
    swap_space: Gibibytes | None = setting(
        None, "bytes of host memory for KV blocks of preempted requests (4: 4GiB); default: 4GiB on cuda, else 0"
    )
    memory_limit: Bytes | None = setting(
        None, "bytes of device memory for weights, KV, adapters and steps; default: what is free at start", ge=1024
    )
    gpu_memory_utilization: float | None = setting(
        None, "part of a GPU's memory for all that --memory-limit bounds; default: what is free", gt=0, le=1
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of equal beginnings of prompts, within a tenant")
    share_base_prefixes: bool = setting(
        False, "let tenants reuse one another's KV blocks of the base model alone: a prompt's timing tells"
    )


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The engine's process."""

    engine: EngineHostName = setting(
        "thread",
        "where the engine runs; process: in a child, which is started again if it crashes",
        on_cuda="process",
    )
    engine_step_timeout: float = setting(
        300.0, "seconds without progress after which the engine counts as hung; 0: any number", ge=0, le=YEAR
    )
    engine_max_restarts: int = setting(
        5,
        "restarts of the engine within ten minutes, after which the server gives up and exits with 3",
        ge=0,
        le=MAX_COUNT,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    """The order of requests, and drafts of their tokens."""

    policy: PolicyName = setting("fcfs", "order of waiting requests")
    max_wait_ms: float = setting(
        10_000, "milliseconds after which no policy lets anybody overtake a waiting request", gt=0, le=1000 * YEAR
    )
    tenant_weight: TenantWeights = setting(
        (), "TENANT=NUMBER share of a tenant under --policy fair (others: 1); repeatable"
    )
    speculate: Draft = setting(
        "auto",
        "tokens of a row and step that may be guessed from its prompt and answer: 1 to 16; auto: as many as "
        "pay; off: none",
        on_cuda="off",  # a step with guesses is no captured graph
    )

    @property
    def max_wait(self) -> float:
        """Seconds after which no policy lets another request overtake one."""
        return self.max_wait_ms / 1000


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """The kernels, and the work that is done before the first request."""

    attention: AttentionName = setting("auto", "paged attention; auto: the fastest that runs here")
    fuse_layers: bool = setting(True, "fused kernels (CPU) or joined layers and experts (GPU) where they prove equal")
    lora_kernel: LoraKernelName = setting("auto", "LoRA delta; auto: the fastest that runs here")
    lora_target_modules: Texts = setting(
        (), "modules that adapters mostly touch, as q_proj: captured steps on GPUs launch for no others until one does"
    )
    compile_layers: bool = setting(True, "on GPUs let torch compile decoder layers where they prove to be equal")
    cuda_graphs: bool = setting(True, "on GPUs capture steps once and replay them")
    launch_ahead: bool = setting(True, "on GPUs launch a step before the results of the one before it are here")
    warmup: Literal["auto", "full", "off"] = setting("auto", "work done before /ready answers 200")


class EngineSettings(KernelSettings, SchedulingSettings, HostSettings):
    """The engine's process, its order of requests, its kernels."""
