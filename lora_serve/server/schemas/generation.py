"""POST /v1/completions and POST /v1/chat/completions"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import (
    MAX_SALT_LENGTH,
    AllowedIds,
    BadWords,
    Biases,
    Documents,
    Fields,
    NumChoices,
    NumLogprobs,
    Objects,
    ObjectsOrNull,
    StopIds,
    Stops,
    TemplateValues,
    TextOrObject,
    without_null,
)
from lora_serve.server.schemas.request import UnservedChatFields, UnservedCompletionFields, UnservedFields
from lora_serve.server.schemas.structured import StructuredFields

MAX_TOKENS = 2**31 - 1


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool = False

    @property
    def shows_usage(self) -> bool:
        """True if the stream ends with its usage; who asks for it in every chunk asks for that too, as in vLLM."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


class AnswerFields(UnservedFields, StructuredFields):
    """vLLM's and OpenAI's fields, and our own, that decide the text of an answer by any route."""

    stream: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    logit_bias: Biases = Field(default_factory=tuple)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = Field(default_factory=tuple)
    stop_token_ids: StopIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: AllowedIds = []
    bad_words: BadWords = []
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)  # -1: to what the model has room for
    truncation_side: Literal["left", "right"] = "left"  # that loses tokens
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_LENGTH)


class SamplingFields(AnswerFields):
    """Those, and the fields that decide how much of it is shown and how."""

    n: NumChoices = 1
    stream_options: Annotated[StreamOptions, BeforeValidator(without_null)] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    echo: bool = False

    @property
    def num_rows(self) -> int:
        """The number of answers to each prompt that are generated; `n` of them are shown."""
        return self.n

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of an answer; None: as many as the prompt leaves room for."""
        return self.max_completion_tokens

    @model_validator(mode="after")
    def _check_together(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is allowed only with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            message = "`prompt_logprobs` are not part of a stream: ask for them with stream: false."
            raise InvalidRequestError(message, param="prompt_logprobs")
        return self


class CompletionFields(SamplingFields, UnservedCompletionFields):
    prompt: Any  # str | list[str] | list[int] | list[list[int]]; checked by hand, as a union's errors are unreadable
    max_tokens: int = Field(16, ge=0, le=MAX_TOKENS)
    best_of: NumChoices | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True

    @property
    def num_rows(self) -> int:
        return self.best_of or self.n

    @property
    def answer_tokens(self) -> int:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_best_of(self) -> Any:
        if self.num_rows < self.n:
            raise InvalidRequestError("`best_of` must not be less than `n`.", param="best_of")
        if self.stream and self.num_rows > self.n:
            raise InvalidRequestError(
                "`best_of` answers are compared when all have ended: leave out `stream`.", param="best_of"
            )
        return self


class ChatFields(SamplingFields, UnservedChatFields):
    messages: Objects  # checked by text/chat.py
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateValues = {}
    documents: Documents = []
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True
    tools: ObjectsOrNull = None  # with `tool_choice` checked by schemas/tools.py
    tool_choice: TextOrObject = None
    parallel_tool_calls: bool = True

    @property
    def template_values(self) -> dict[str, Any]:
        """The values that the chat template is given."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        values: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":  # templates of the kind that can be told not to think know this name
            values["enable_thinking"] = False
        return values | self.chat_template_kwargs

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _check_chat(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` is allowed only with logprobs: true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "`continue_final_message` and `add_generation_prompt` cannot both be true."
            raise InvalidRequestError(message, param="continue_final_message")
        return self
