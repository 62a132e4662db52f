"""POST /v1/completions and POST /v1/chat/completions"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import (
    Biases,
    Fields,
    NumChoices,
    NumLogprobs,
    StopIds,
    Stops,
    TemplateValues,
    without_null,
)
from lora_serve.server.schemas.request import RequestFields
from lora_serve.server.schemas.structured import StructuredFields

MAX_TOKENS = 2**31 - 1


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(RequestFields, StructuredFields):
    """vLLM's and OpenAI's sampling fields, and our own."""

    n: NumChoices = 1
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_null)] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    logit_bias: Biases = ()
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = ()
    stop_token_ids: StopIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool = False
    echo: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is allowed only with stream: true.", param="stream_options")
        return self


class CompletionFields(SamplingFields):
    prompt: Any  # str | list[str] | list[int] | list[list[int]]; checked by hand, as a union's errors are unreadable
    max_tokens: int = Field(16, ge=0, le=MAX_TOKENS)
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True


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
