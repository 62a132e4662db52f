"""POST /v1/responses"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

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
from lora_serve.server.schemas.generation import MAX_TOKENS, AnswerFields
from lora_serve.server.schemas.request import UnservedChatFields

_NO_STORE = "answers are not stored: send all former items in `input`"
_ONE_ANSWER = "one answer is given here: send several requests, or use /v1/chat/completions"
_NOT_SHOWN = "answers here have no place for it: use /v1/chat/completions"
_LOGPROBS = '"message.output_text.logprobs"'


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
    n: Annotated[Any, Refused(_ONE_ANSWER, (1,))] = None
    best_of: Annotated[Any, Refused(_ONE_ANSWER, (1,))] = None
    prompt_logprobs: Annotated[Any, Refused(_NOT_SHOWN)] = None
    return_token_ids: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
    echo: Annotated[Any, Refused(_NOT_SHOWN, (False,))] = None
