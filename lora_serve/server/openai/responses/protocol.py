"""POST /v1/responses: the fields of a request, and the answer. A field that may be UNSET is left out then."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field

from lora_serve.server.openai.translated import StreamEvent
from lora_serve.server.schemas.fields import (
    Documents,
    Fields,
    Ignored,
    NumLogprobs,
    ObjectOrNull,
    ObjectsOrNull,
    Refused,
    TemplateValues,
    TextOrObject,
    without_null,
)
from lora_serve.server.schemas.generated import TokenLogprob
from lora_serve.server.schemas.inference import MAX_TOKENS, NOT_SHOWN, ONE_ANSWER, AnswerFields, UnservedChatFields

_NO_STORE = "answers are not stored: send all former items in `input`"
_LOGPROBS = '"message.output_text.logprobs"'
Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningFields(Fields):
    """`reasoning`. A summary is not made: the reasoning itself is in the answer."""

    effort: str | None = None


class ResponseStreamOptions(Fields):
    """`stream_options`"""

    include_obfuscation: Annotated[Any, Ignored("nothing is padded")] = None


class ResponseFields(AnswerFields, UnservedChatFields):
    """OpenAI's fields, and those of a chat. A chat's fields that have another name here, or none, are refused."""

    input: Any  # str | list of items; checked by hand
    instructions: str | None = None
    stream_options: Annotated[ResponseStreamOptions, BeforeValidator(without_null)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    top_logprobs: NumLogprobs = 0
    include: list[str] = []
    text: ObjectOrNull = None  # {"format": ...}
    tools: ObjectsOrNull = None
    tool_choice: TextOrObject = None
    parallel_tool_calls: bool = True
    reasoning: Annotated[ReasoningFields, BeforeValidator(without_null)] | None = None
    metadata: dict[str, Any] = {}
    previous_response_id: Annotated[Any, Refused(_NO_STORE)] = None
    conversation: Annotated[Any, Refused(_NO_STORE)] = None
    background: Annotated[Any, Refused(f"every answer is waited for, as {_NO_STORE}", (False,))] = None
    prompt: Annotated[Any, Refused("no prompts are kept here: send `instructions` and `input`")] = None
    truncation: Annotated[Any, Ignored("nothing is cut: what is too long is refused")] = None
    context_management: Annotated[Any, Ignored("nothing is compacted: what is too long is refused")] = None
    moderation: Annotated[Any, Refused("answers are not moderated: leave it out")] = None
    image: Annotated[Any, Refused("models here read and write text only")] = None
    access_programs: Annotated[Any, Ignored("has a meaning for OpenAI's own models only")] = None
    max_tool_calls: Annotated[Any, Ignored("counts calls of the server's own tools, and there are none")] = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateValues = {}
    documents: Documents = []
    include_reasoning: bool = True
    return_tokens_as_token_ids: bool = False
    messages: Annotated[Any, Refused("this is `input` here")] = None
    max_tokens: Annotated[Any, Refused("this is `max_output_tokens` here")] = None
    max_completion_tokens: Annotated[Any, Refused("this is `max_output_tokens` here")] = None
    response_format: Annotated[Any, Refused("this is `text.format` here", ({"type": "text"},))] = None
    reasoning_effort: Annotated[Any, Refused("this is `reasoning.effort` here")] = None
    logprobs: Annotated[Any, Refused(f"ask with {_LOGPROBS} in `include`", (False,))] = None
    n: Annotated[Any, Refused(ONE_ANSWER, (1,))] = None
    best_of: Annotated[Any, Refused(ONE_ANSWER, (1,))] = None
    prompt_logprobs: Annotated[Any, Refused(NOT_SHOWN)] = None
    return_token_ids: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None
    echo: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None


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


class ResponseEvent(StreamEvent, kw_only=True):
    """One event of a stream; by its `type` it has more fields."""

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
