"""POST /inference/v1/generate: token ids in, token ids out, as vLLM has it for trainers; /tokenize and the like."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import PromptEvent, TokenLogprobs
from lora_serve.server.answers import json_answer, json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import (
    chat_messages,
    chat_prompt,
    check_can_fit,
    completion_prompts,
    thread_if_long,
)
from lora_serve.server.inference.reading import asked_tools, requested_grammar
from lora_serve.server.inference.requests import TokenLimits, check_vocabulary, generation_requests
from lora_serve.server.inference.resolve import named_tokenizer, resolve
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.openai.answering import AnswerBody, answer
from lora_serve.server.openai.chat import ChoiceState
from lora_serve.server.openai.translated import with_names
from lora_serve.server.schemas.fields import MAX_SALT_LENGTH, Ignored, Objects, Refused, without_null
from lora_serve.server.schemas.generated import (
    ChatLogprobs,
    PromptLogprobs,
    TokenSpeller,
    Usage,
    chat_logprobs,
    num_values,
    prompt_logprobs,
)
from lora_serve.server.schemas.inference import ChatFields, CompletionFields, NamingFields, RequestFields, StreamOptions
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.usage import AnswerUse
from lora_serve.text.output import Piece

MAX_TOKEN_IDS = 2_000_000
_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_TOKEN_IDS}
TokenIds = Annotated[Any, WithJsonSchema(_LIST)]  # see `check_token_ids`
# Those of a completion's fields that say more than how tokens are chosen; no part of vLLM's SamplingParams.
_NOT_SAMPLING = ("prompt", "echo", "best_of", "suffix", "stream", "stream_options", "cache_salt", "add_special_tokens")
_SAME = (
    "model", "adapters", "adapter_id", "user", "priority", "timeout_ms", "max_cold_wait_ms", "on_cold", "stream",
    "stream_options", "cache_salt",
)  # fmt: skip


class TokenizeTextFields(NamingFields):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(ChatFields):
    messages: Objects
    return_token_strs: bool = False


class DetokenizeFields(NamingFields):
    tokens: TokenIds


def check_token_ids(value: Any) -> Sequence[int]:
    """The `tokens` of a request, checked by hand, as pydantic checks a list in one go and keeps every thread waiting.

    Raises InvalidRequestError.
    """
    if not isinstance(value, list | array):
        raise _wrong("tokens", "Input should be a valid list")
    if len(value) > MAX_TOKEN_IDS:
        raise _wrong("tokens", f"List should have at most {MAX_TOKEN_IDS} items, not {len(value)}")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise _wrong(f"tokens[{index}]", "Input should be a valid integer")
        if token_id < 0:
            raise _wrong(f"tokens[{index}]", "Input should be greater than or equal to 0")
    return value


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {message}", param=param)


class GenerateFields(RequestFields):
    """vLLM's fields: a prompt as token ids, to be answered by token ids."""

    token_ids: Any  # list[int]; checked by hand
    sampling_params: dict[str, Any] = {}  # of vLLM's names, checked as the fields of a completion
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_null)] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_LENGTH)
    features: Annotated[Any, Refused("models here read and write text only")] = None
    request_id: Annotated[Any, Ignored("requests are told apart by the server's own ids")] = None
    kv_transfer_params: Annotated[Any, Ignored("no key or value is moved between servers")] = None


class TokensPart(Struct):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class GeneratedTokens(Struct, kw_only=True):
    """POST /inference/v1/generate"""

    request_id: str
    id: str
    object: Literal["generate.tokens"] = "generate.tokens"
    created: int
    model: str
    choices: list[TokensPart]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None = None


class TokensChunk(Struct, kw_only=True):
    """One event of a stream; the last one with `usage` has no choices."""

    request_id: str
    id: str
    object: Literal["generate.tokens.chunk"] = "generate.tokens.chunk"
    created: int
    model: str
    choices: list[TokensPart]
    usage: Usage | UnsetType | None = UNSET


class Tokens(Struct):
    """POST /tokenize"""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str | None] | None


class Text(Struct):
    """POST /detokenize"""

    prompt: str


class TokenizerInfo(Struct):
    tokenizer_class: str
    vocab_size: int
    chat_template: str | None


async def generate_tokens(request: web.Request) -> web.StreamResponse:
    """Generate token ids from token ids."""
    services, context = request.app[SERVICES], request[CONTEXT]
    given = await read_json(request)
    asked = check_fields(GenerateFields, given)
    with with_names({"prompt": "token_ids"}):
        fields = check_fields(CompletionFields, completion_fields(asked, given), services.config)
        model = resolve(request, fields)
        fields = model.with_defaults(fields)
        grammar = await requested_grammar(services, context, model, fields)
        (prompt,) = await completion_prompts(model.text, model.spec, fields)
        if fields.answer_tokens == 0:
            message = "`sampling_params.max_tokens` must be at least 1: an answer is tokens here."
            raise InvalidRequestError(message, param="max_tokens")
        has_end = {"max_tokens", "max_completion_tokens"} & fields.model_fields_set
        limits = TokenLimits(fields.answer_tokens if has_end else None, fields.logprobs, fields.prompt_logprobs)
        requests = generation_requests(request, model, fields, limits, [prompt.token_ids], grammar)
    body = TokensBody(
        id=context.request_id,
        context=context,
        fields=fields,
        model=model,
        requests=requests,
        use=AnswerUse(requests, fields.num_rows),
        speller=TokenSpeller(model.text, as_ids=True, shows_bytes=False),
        num_top=fields.logprobs or (None if fields.logprobs is None else 1),  # 0: the token itself, as in vLLM
        choices=[ChoiceState() for _ in requests],
    )
    return await answer(request, body)


def completion_fields(asked: GenerateFields, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a completion of the same tokens. `given`: the body as it came. Raises InvalidRequestError."""
    token_ids = asked.token_ids
    if not isinstance(token_ids, array) and not (isinstance(token_ids, list) and {*map(type, token_ids)} == {int}):
        raise InvalidRequestError("`token_ids` must be a list of at least one token id.", param="token_ids")
    sampling = {
        name: value
        for name, value in asked.sampling_params.items()
        if name in CompletionFields.model_fields and name not in _NOT_SAMPLING and value is not None
    }
    return {**sampling, **{name: given[name] for name in _SAME if name in given}, "prompt": token_ids}


@dataclass(slots=True, kw_only=True)
class TokensBody(AnswerBody):
    """The answer, whole or in chunks. The token that ended it is its last, whether text would show it or not."""

    chunk_kind: ClassVar = TokensChunk
    speller: TokenSpeller
    num_top: int | None  # alternatives for each token; None: no log-probabilities
    choices: list[ChoiceState]
    prompt_entries: list[TokenLogprobs | None] | None = None

    @property
    def num_values(self) -> int:
        """See `AnswerBody.num_values`."""
        num_entries = num_values(self.prompt_entries) + sum(num_values(choice.entries) for choice in self.choices)
        return num_entries + sum(len(choice.token_ids) for choice in self.choices)

    def add(self, number: int, event: PromptEvent | Piece) -> None:
        if isinstance(event, PromptEvent):
            self.prompt_entries = None if event.prompt_logprobs is None else list(event.prompt_logprobs)
            return
        self.choices[number].add(event)

    def forget(self, number: int) -> None:
        self.choices[number] = self.choices[number].anew()

    def whole(self) -> GeneratedTokens:
        choices = [self._shown(index, choice) for index, choice in enumerate(self.choices)]
        prompt = None if self.prompt_entries is None else prompt_logprobs(self.speller.text, self.prompt_entries)
        return GeneratedTokens(**self.common_fields(), choices=choices, usage=self.usage(), prompt_logprobs=prompt)

    def chunks(self, number: int, event: PromptEvent | Piece) -> Iterator[TokensChunk]:
        if isinstance(event, Piece) and (event.token_ids or event.finish_reason is not None):
            choice = ChoiceState()
            choice.add(event)
            yield self.chunk(number, self._shown(number, choice))

    def common_fields(self) -> Mapping[str, Any]:
        return {"request_id": self.id, **AnswerBody.common_fields(self)}

    def _shown(self, index: int, choice: ChoiceState) -> TokensPart:
        logprobs = None if self.num_top is None else chat_logprobs(self.speller, choice.entries, self.num_top)
        return TokensPart(index, choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Turn a text or a chat into token ids.

    A `prompt`, or `messages` as chat would render them.
    """
    body = await read_json(request)
    fields: TokenizeTextFields | TokenizeChatFields
    if "messages" in body:
        fields = check_fields(TokenizeChatFields, body)
        text, spec = named_tokenizer(request, fields)
        messages, tools = await chat_messages(fields.messages), await asked_tools(fields)
        token_ids = await chat_prompt(text, spec, fields, messages, tools)
    else:
        fields = check_fields(TokenizeTextFields, body)
        text, spec = named_tokenizer(request, fields)
        prompt, special = fields.prompt, fields.add_special_tokens
        check_can_fit(text, spec, prompt, "prompt")
        token_ids = await thread_if_long(len(prompt), lambda: text.encode(prompt, special))
    with_spelling = fields.return_token_strs

    def made() -> Tokens:
        spelled = [text.token(token_id) for token_id in token_ids] if with_spelling else None
        return Tokens(len(token_ids), spec.max_model_len, token_ids, spelled)

    return await json_answer(request, made, len(token_ids))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Turn token ids into text.

    Special tokens are shown.
    """
    fields = check_fields(DetokenizeFields, await read_json(request))
    token_ids = await asyncio.to_thread(check_token_ids, fields.tokens)
    text, spec = named_tokenizer(request, fields)

    def decoded() -> str:
        check_vocabulary(token_ids, spec, "tokens")
        return text.decode(token_ids, skip_special_tokens=False)

    found = await asyncio.to_thread(decoded)
    return await json_answer(request, lambda: Text(found), len(found) // 8)


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """Describe the tokenizer."""
    return json_response(request.app[SERVICES].text.info())
