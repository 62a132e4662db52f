"""How large a step is, and who may wait for one."""

from __future__ import annotations

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import MAX_COUNT, YEAR


class BatchSettings(SettingsGroup):
    """How large a step is, and who may wait for one."""

    max_num_seqs: int = Field(64, ge=1, le=4096, description="rows in one step at most")
    max_num_batched_tokens: int = Field(
        512, ge=16, le=2**20, description="tokens in one step at most; longer prompts run in chunks"
    )
    batch_wait_ms: float = Field(
        0.0, ge=0, le=60_000, description="milliseconds that the first waiting request waits for others; 0: none"
    )
    preferred_batch_size: int | None = Field(
        None, ge=1, le=4096, description="waiting requests that start a batch before --batch-wait-ms is over"
    )
    latency_target_ms: float | None = Field(
        None,
        ge=0.001,
        le=1000 * YEAR,
        description="p95 of time to first token, milliseconds, for which batches are sized; default: none",
    )
    inter_token_target_ms: float | None = Field(
        None,
        ge=0.001,
        le=1000 * YEAR,
        description="p95 of inter-token time, milliseconds, for which batches are sized; default: none",
    )
    prompt_stretch: float = Field(
        2.0,
        ge=0,
        le=1_000_000,
        description="prompts make a step with decode rows at most so many times longer, about; 0: any size",
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
