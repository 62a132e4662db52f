"""How much one inference request may ask for."""

from __future__ import annotations

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup


class RequestLimitSettings(SettingsGroup):
    """How much one inference request may ask for."""

    max_n: int = Field(16, ge=1, le=1024, description="`n` of a request at most: answers to one prompt")
    max_prompts: int = Field(64, ge=1, le=4096, description="prompts of a request at most")
    max_logprobs: int = Field(20, ge=0, le=1000, description="`logprobs` of a request at most: alternatives per token")
    max_stop: int = Field(16, ge=1, le=1024, description="stop strings of a request at most")
    max_stop_length: int = Field(1024, ge=1, le=2**20, description="characters of a stop string at most")
    max_stop_token_ids: int = Field(256, ge=1, le=2**16, description="`stop_token_ids` of a request at most")
    max_logit_bias: int = Field(300, ge=1, le=2**16, description="entries of `logit_bias` of a request at most")
