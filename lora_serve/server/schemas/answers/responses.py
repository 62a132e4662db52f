"""Answers of POST /v1/responses, in OpenAI's shape."""

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
