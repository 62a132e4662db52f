"""Answers of POST /v1/completions and POST /v1/chat/completions, in OpenAI's shape."""

from __future__ import annotations

from typing import Any, Literal

from lora_serve.server.schemas.answers.base import Answer


class CachedTokens(Answer):
    cached_tokens: int


class ReasoningTokens(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionPart(Answer):
    """One choice, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None  # with `return_token_ids`
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionPart):
    prompt_logprobs: PromptLogprobs | None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    """One event of a stream; the last one with `usage` has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPart]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Answer):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under the newer name
    refusal: str | None = None


class ChatChoice(Answer):
    index: int
    token_ids: list[int] | None = None  # with `return_token_ids`
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatPart(Answer):
    index: int
    token_ids: list[int] | None = None  # with `return_token_ids`
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChatChunk(Answer):
    """One event of a stream; the last one with `usage` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPart]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class TokensPart(Answer):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class GeneratedTokens(Answer):
    """POST /inference/v1/generate"""

    request_id: str
    model: str
    choices: list[TokensPart]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None


class TokensChunk(Answer):
    """One event of a stream; the last one with `usage` has no choices."""

    request_id: str
    model: str
    choices: list[TokensPart]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    digest: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class DeletedModel(Answer):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class Tokens(Answer):
    """POST /tokenize"""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """POST /detokenize"""

    prompt: str


class TokenizerInfo(Answer):
    tokenizer_class: str
    vocab_size: int
    chat_template: str | None
