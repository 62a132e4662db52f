"""The fields of inference requests: the adapters that answer, urgency, sampling; all of completions and of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.constraints import StructuredFields
from lora_serve.server.schemas.fields import (
    MAX_SALT_LENGTH,
    AllowedIds,
    BadWords,
    Biases,
    Documents,
    Fields,
    Ignored,
    Name,
    NumChoices,
    NumLogprobs,
    Objects,
    ObjectsOrNull,
    Refused,
    StopIds,
    Stops,
    TemplateValues,
    TextOrObject,
    User,
    without_null,
)

MAX_ADAPTERS = 8  # composed in one request
MAX_SCALE = 100.0
DAY_MS = 24 * 3600 * 1000
_NO_TRANSFER = "one server computes prompt and answer; no key or value is moved between servers"
ONE_ANSWER = "one answer is given here: send several requests, or use /v1/chat/completions"
NOT_SHOWN = "answers here have no place for it: use /v1/chat/completions"
NO_MEDIA = "models here read and write text only"
_ONE_CACHE = "every tenant's prompts are found again by their tokens; `cache_salt` keeps prompts apart"
_FOR_CHATS = "tools are for chats: use /v1/chat/completions"
_OLDER_FORM = "this is OpenAI's older form of tools: use `tools` and `tool_choice`"
_NO_STORE = "no answer is stored, so nothing can be found again by it"
MAX_TOKENS = 2**31 - 1


class AdapterScale(Fields):
    """One element of `adapters`. Its deltas count `scale` times; a negative scale takes them away."""

    id: Name
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE)


AdapterScales = Annotated[
    list[Annotated[AdapterScale, BeforeValidator(without_null)]], Field(min_length=1, max_length=MAX_ADAPTERS)
]


class NamingFields(Fields):
    """The names in a request: of the model, and of the adapters on it."""

    model: Name | None = None
    adapters: AdapterScales | None = None
    adapter_id: Name | None = None
    user: User = None

    @property
    def end_user(self) -> str | None:
        """The name that, with the tenant, decides the side of a canary."""
        return self.user


class RequestFields(NamingFields):
    """The base of inference requests."""

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout_ms: int | None = Field(None, ge=1, le=DAY_MS)
    max_cold_wait_ms: int | None = Field(None, ge=0, le=DAY_MS)
    on_cold: Literal["wait", "base", "previous", "fail"] = "wait"


class UnservedInputFields(RequestFields):
    """Fields that all requests with texts have in common."""

    chat_template: Annotated[
        Any,
        Refused("a request's template is never used: the model has one, and its adapter may have another", ("",)),
    ] = None
    mm_processor_kwargs: Annotated[Any, Ignored(NO_MEDIA)] = None
    request_id: Annotated[Any, Ignored("the server's own ids count; the header `X-Request-Id` is given back")] = None


class UnservedFields(UnservedInputFields):
    """Fields that completions and chat have in common."""

    use_beam_search: Annotated[Any, Refused("beam search is not done here: use `n` with `best_of`", (False,))] = None
    length_penalty: Annotated[Any, Ignored("has a meaning for beam search only, which is refused")] = None
    watermarking: Annotated[Any, Refused("answers are not watermarked: leave it out", (False,))] = None
    spaces_between_special_tokens: Annotated[
        Any, Ignored("means nothing to fast tokenizers, the only ones that are loaded")
    ] = None
    logprob_token_ids: Annotated[
        Any, Refused("log-probabilities are given for the likeliest tokens only: use `logprobs` or `top_logprobs`")
    ] = None
    repetition_detection: Annotated[
        Any, Refused("loops are not looked for: use `repetition_penalty` or `frequency_penalty`")
    ] = None
    thinking_token_budget: Annotated[Any, Refused("thinking has no budget of its own: use `max_tokens`", (-1,))] = None
    kv_transfer_params: Annotated[Any, Ignored(_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[Any, Ignored(_NO_TRANSFER)] = None
    vllm_xargs: Annotated[Any, Ignored("is read by vLLM's own plugins only, and there are none here")] = None
    return_mm_kwargs: Annotated[Any, Ignored("has a meaning for vLLM's render endpoints only")] = None
    return_token_offsets: Annotated[Any, Ignored("has a meaning for vLLM's render endpoints only")] = None
    routed_experts_prompt_start: Annotated[Any, Ignored("experts' routes are not returned")] = None
    session_id: Annotated[Any, Ignored("requests are found together by their prompts, not by a name")] = None
    stream_interval: Annotated[Any, Ignored("each step's tokens are sent at once; the text is the same")] = None


class UnservedCompletionFields(UnservedFields):
    """Fields of POST /v1/completions alone."""

    suffix: Annotated[Any, Refused("texts are continued, not filled in: write the model's own marks of prefix and "
                                   "suffix into `prompt`", ("",))] = None  # fmt: skip
    tools: Annotated[Any, Refused(_FOR_CHATS, ([],))] = None
    tool_choice: Annotated[Any, Refused(_FOR_CHATS, ("none",))] = None
    prompt_embeds: Annotated[Any, Refused("prompts are texts or token ids: send `prompt`")] = None


class UnservedChatFields(UnservedFields):
    """Fields of POST /v1/chat/completions alone."""

    best_of: Annotated[Any, Refused("is for /v1/completions; here ask for `n` answers and choose", (1,))] = None
    suffix: Annotated[Any, Refused("is not for chats: let the last message ask for it", ("",))] = None
    functions: Annotated[Any, Refused(_OLDER_FORM, ([],))] = None
    function_call: Annotated[Any, Refused(_OLDER_FORM, ("none",))] = None
    audio: Annotated[Any, Refused(f"no sound can be answered: {NO_MEDIA}")] = None
    modalities: Annotated[Any, Refused(f'only ["text"] can be answered: {NO_MEDIA}', (["text"], []))] = None
    web_search_options: Annotated[Any, Refused("the web is not searched: put what is known into `messages`")] = None
    moderation: Annotated[Any, Refused("answers are not moderated: leave it out")] = None
    verbosity: Annotated[Any, Ignored("models here have no such setting: ask in words")] = None
    return_prompt_text: Annotated[
        Any, Refused("use `return_token_ids`, or POST /tokenize and /detokenize", (False,))
    ] = None
    prediction: Annotated[Any, Ignored("can make an answer quicker, but never another one")] = None
    media_io_kwargs: Annotated[Any, Ignored(NO_MEDIA)] = None
    store: Annotated[Any, Ignored(_NO_STORE)] = None
    metadata: Annotated[Any, Ignored(_NO_STORE)] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see `priority`")] = None
    safety_identifier: User = None  # OpenAI's newer word for `user`
    prompt_cache_key: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_options: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_retention: Annotated[Any, Ignored(_ONE_CACHE)] = None

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier


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
    tools: ObjectsOrNull = None  # with `tool_choice` checked by schemas/constraints.py
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
