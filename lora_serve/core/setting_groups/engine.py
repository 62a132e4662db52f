"""How the engine runs: its host, its order, its kernels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import Weights


class EngineSettings(SettingsGroup):
    """How the engine runs: its host, its order, its kernels."""

    engine: Literal["thread"] = Field("thread", description="where the engine runs")
    policy: Literal["fcfs", "affinity", "fair", "deadline", "priority"] = Field(
        "fcfs", description="order of waiting requests"
    )
    max_wait_ms: float = Field(
        10_000, gt=0, description="milliseconds after which no policy lets anybody overtake a waiting request"
    )
    tenant_weight: Weights = Field(
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
