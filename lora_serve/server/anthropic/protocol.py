"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them: the fields of a request, and the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field

from lora_serve.server.answers import WireError
from lora_serve.server.openai.translated import StreamEvent
from lora_serve.server.schemas.fields import (
    Documents,
    Fields,
    Ignored,
    ObjectOrNull,
    Objects,
    ObjectsOrNull,
    Refused,
    Stops,
    TemplateValues,
    User,
    without_null,
)
from lora_serve.server.schemas.inference import (
    MAX_TOKENS,
    NOT_SHOWN,
    ONE_ANSWER,
    AnswerFields,
    RequestFields,
    UnservedChatFields,
)

_PREFILL = "here a last message of the assistant's is gone on with, and nothing else is"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageMetadata(Fields):
    """`metadata`"""

    user_id: User = None


class CountTokensFields(RequestFields):
    """The fields that make the prompt. Contents are checked by hand."""

    messages: Objects
    system: Any = None  # str | list of text blocks
    tools: ObjectsOrNull = None
    tool_choice: ObjectOrNull = None
    thinking: ObjectOrNull = None
    output_config: ObjectOrNull = None
    chat_template_kwargs: TemplateValues = {}
    documents: Documents = []
    add_special_tokens: bool = False
    mcp_servers: Annotated[Any, Ignored("the server calls no tools itself")] = None
    context_management: Annotated[Any, Ignored("nothing is edited; what is too long is refused")] = None
    cache_control: Annotated[Any, Ignored("prompts are found again by their tokens, wherever they agree")] = None
    speed: Annotated[Any, Ignored("there is one speed; see `priority`")] = None


class MessageFields(CountTokensFields, AnswerFields, UnservedChatFields):
    """The fields of an answer too, those of a chat among them. A chat's that have another name here are refused."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Stops = Field(default_factory=tuple)
    metadata: Annotated[MessageMetadata, BeforeValidator(without_null)] | None = None
    container: Annotated[Any, Refused("nothing is run in containers here")] = None
    inference_geo: Annotated[Any, Refused("this server computes where it stands")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see `priority`")] = None
    diagnostics: Annotated[Any, Ignored("nothing is diagnosed")] = None
    user_profile_id: Annotated[Any, Ignored("the key says who calls; `metadata` names your end user")] = None
    workspace_id: Annotated[Any, Ignored("the key says who calls")] = None
    kv_transfer_params: Annotated[Any, Ignored("no key or value is moved between servers")] = None

    include_reasoning: bool = True
    stop: Annotated[Any, Refused("this is `stop_sequences` here", ([],))] = None
    max_completion_tokens: Annotated[Any, Refused("this is `max_tokens` here")] = None
    response_format: Annotated[Any, Refused("this is `output_config.format` here", ({"type": "text"},))] = None
    reasoning_effort: Annotated[Any, Refused("this is `output_config.effort` here")] = None
    parallel_tool_calls: Annotated[Any, Refused("this is `tool_choice.disable_parallel_tool_use` here", (True,))] = None
    add_generation_prompt: Annotated[Any, Refused(_PREFILL, (True,))] = None
    continue_final_message: Annotated[Any, Refused(_PREFILL, (False,))] = None
    n: Annotated[Any, Refused(ONE_ANSWER, (1,))] = None
    best_of: Annotated[Any, Refused(ONE_ANSWER, (1,))] = None
    logprobs: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None
    top_logprobs: Annotated[Any, Refused(NOT_SHOWN, (0,))] = None
    prompt_logprobs: Annotated[Any, Refused(NOT_SHOWN)] = None
    return_token_ids: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None
    return_tokens_as_token_ids: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None
    echo: Annotated[Any, Refused(NOT_SHOWN, (False,))] = None
    stream_options: Annotated[Any, Ignored("a stream's last event but one tells the usage anyway")] = None


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


class MessageEvent(StreamEvent, kw_only=True):
    """One event of a stream; by its `type` it has more fields."""

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


def anthropic_error(error: WireError, request_id: str) -> AnthropicError:
    """The body of an error in Anthropic's form, with our own `param` and `code`."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    facts = AnthropicErrorFacts(kind, error.message, error.param, error.code)
    return AnthropicError(error=facts, request_id=request_id)


class CountedEdits(Struct):
    original_input_tokens: int


class TokenCount(Struct):
    """POST /v1/messages/count_tokens"""

    input_tokens: int
    context_management: CountedEdits | UnsetType = UNSET  # where the request has one
