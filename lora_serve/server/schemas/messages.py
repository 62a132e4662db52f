"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

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
from lora_serve.server.schemas.generation import MAX_TOKENS, AnswerFields
from lora_serve.server.schemas.request import RequestFields, UnservedChatFields

_ONE_ANSWER = "one answer is given here: send several requests, or use /v1/chat/completions"
_NOT_SHOWN = "answers here have no place for it: use /v1/chat/completions"
_PREFILL = "here a last message of the assistant's is gone on with, and nothing else is"


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
    n: Annotated[Any, Refused(_ONE_ANSWER, (1,))] = None
    best_of: Annotated[Any, Refused(_ONE_ANSWER, (1,))] = None
    logprobs: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
    top_logprobs: Annotated[Any, Refused(_NOT_SHOWN, (0,))] = None
    prompt_logprobs: Annotated[Any, Refused(_NOT_SHOWN)] = None
    return_token_ids: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
    return_tokens_as_token_ids: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
    echo: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
    stream_options: Annotated[Any, Ignored("a stream's last event but one tells the usage anyway")] = None
