"""Answers of POST /v1/responses, in OpenAI's shape, and of POST /v1/messages, in Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lora_serve.server.schemas.answers.base import Answer
from lora_serve.server.schemas.answers.generation import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | ReasoningItem | FunctionCallItem, Field(discriminator="type")]


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class Response(Answer):
    """Beside these it repeats what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    store: Literal[False]
    usage: ResponseUsage | None


class ResponseEvent(Answer):
    """One event of a stream; by its `type` it has more fields."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    delta: str | None = None


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class MessageUsage(Answer):
    """All of the prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """One event of a stream; by its `type` it has more fields."""

    type: str
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: Block | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None


class TokenCount(Answer):
    """POST /v1/messages/count_tokens"""

    input_tokens: int
