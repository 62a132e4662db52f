"""Answers of POST /v1/responses, in OpenAI's shape, and of POST /v1/messages, in Anthropic's. A field that may be UNSET
is left out then.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from lora_serve.server.schemas.answers.generation import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputPart = OutputText | ReasoningText
OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AskedReasoning(Struct):
    effort: str | None
    summary: None = None


class Response(Struct, kw_only=True):
    """Beside what came of it, it repeats what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: AskedReasoning
    store: Literal[False] = False
    temperature: float
    text: Any
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; by its `type` it has more fields."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponseError(Struct, kw_only=True):
    """The last event of a stream that an error ends."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None
    sequence_number: int


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct, kw_only=True):
    """All of the prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AppliedEdits(Struct):
    applied_edits: list[Any] = []


class AnthropicMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET  # where the request has one


class BlockDelta(Struct, kw_only=True):
    """More of a block, or by what the message has ended."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, kw_only=True):
    """One event of a stream; by its `type` it has more fields."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    context_management: AppliedEdits | UnsetType = UNSET


class AnthropicErrorFacts(Struct):
    type: str
    message: str
    param: str | None
    code: str | None


class AnthropicError(Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorFacts
    request_id: str


class CountedEdits(Struct):
    original_input_tokens: int


class TokenCount(Struct):
    """POST /v1/messages/count_tokens"""

    input_tokens: int
    context_management: CountedEdits | UnsetType = UNSET  # where the request has one
