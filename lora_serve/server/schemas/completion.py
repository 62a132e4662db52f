"""POST /v1/completions"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lora_serve.server.schemas.fields import NumLogprobs
from lora_serve.server.schemas.sampling import MAX_TOKENS, SamplingFields


class CompletionFields(SamplingFields):
    prompt: Any  # str | list[str] | list[int] | list[list[int]]; checked by hand, as a union's errors are unreadable
    max_tokens: int = Field(16, ge=0, le=MAX_TOKENS)
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True
