"""The fields of every inference request: the adapters that answer it, and its urgency."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lora_serve.server.schemas.fields import Fields, Ignored, Name, Refused, User, without_null

MAX_ADAPTERS = 8  # composed in one request
MAX_SCALE = 100.0
DAY_MS = 24 * 3600 * 1000


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
    user: User = None  # the end user: with the tenant, who always gets the same side of a canary


class RequestFields(NamingFields):
    """The base of inference requests."""

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout_ms: int | None = Field(None, ge=1, le=DAY_MS)
    max_cold_wait_ms: int | None = Field(None, ge=0, le=DAY_MS)
    on_cold: Literal["wait", "base", "previous", "fail"] = "wait"


_NO_TRANSFER = "one server computes prompt and answer; no key or value is moved between servers"
NO_MEDIA = "models here read and write text only"
_ONE_CACHE = "every tenant's prompts are found again by their tokens; `cache_salt` keeps prompts apart"
_FOR_CHATS = "tools are for chats: use /v1/chat/completions"
_OLDER_FORM = "this is OpenAI's older form of tools: use `tools` and `tool_choice`"
_NO_STORE = "no answer is stored, so nothing can be found again by it"


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
    safety_identifier: Annotated[Any, Ignored("nobody is reported; `user` names your end user")] = None
    prompt_cache_key: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_options: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_retention: Annotated[Any, Ignored(_ONE_CACHE)] = None
