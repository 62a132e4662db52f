"""POST /v1/chat/completions"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import NumLogprobs, TemplateValues
from lora_serve.server.schemas.sampling import MAX_TOKENS, SamplingFields


class ChatFields(SamplingFields):
    messages: Any  # checked by text/chat.py
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateValues = {}

    @model_validator(mode="after")
    def _check_chat(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` is allowed only with logprobs: true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "`continue_final_message` and `add_generation_prompt` cannot both be true."
            raise InvalidRequestError(message, param="continue_final_message")
        return self
