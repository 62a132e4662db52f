"""How the engine runs: its host, its order, its kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import MAX_COUNT, YEAR, TenantWeights


class EngineSettings(SettingsGroup):
    """How the engine runs: its host, its order, its kernels."""

    engine: Literal["thread", "process"] = Field(
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
    policy: Literal["fcfs", "affinity", "fair", "deadline", "priority"] = Field(
        "fcfs", description="order of waiting requests"
    )
    max_wait_ms: float = Field(
        10_000,
        gt=0,
        le=1000 * YEAR,
        description="milliseconds after which no policy lets anybody overtake a waiting request",
    )
    tenant_weight: TenantWeights = Field(
        (), description="TENANT=NUMBER share of a tenant under --policy fair (others: 1); repeatable"
    )
    attention: Literal["auto", "native", "sdpa", "varlen"] = Field(
        "auto", description="paged attention; auto: the fastest that runs here"
    )
    fuse_layers: bool = Field(True, description="fused kernels (CPU, float32) for layers where they prove to be equal")
    lora_kernel: Literal["auto", "loop", "native", "triton"] = Field(
        "auto", description="LoRA delta; auto: the fastest that runs here"
    )
    cuda_graphs: bool = Field(True, description="on GPUs capture decode steps once and replay them")
    warmup: Literal["auto", "full", "off"] = Field("auto", description="work done before /ready answers 200")
