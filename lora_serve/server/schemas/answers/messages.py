"""Answers of POST /v1/messages, in Anthropic's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lora_serve.server.schemas.answers.base import Answer


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
