"""POST /v1/responses"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lora_serve.server.schemas.fields import Biases, Fields, NumLogprobs, StopIds, Stops, TemplateValues, without_null
from lora_serve.server.schemas.generation import MAX_TOKENS
from lora_serve.server.schemas.markers import Ignored, Refused
from lora_serve.server.schemas.request import RequestFields

_NO_STORE = "answers are not stored: send all former items in `input`"


class ReasoningFields(Fields):
    """`reasoning`. A summary is not made: the reasoning itself is in the answer."""

    effort: str | None = None


class ResponseStreamOptions(Fields):
    """`stream_options`"""

    include_obfuscation: Annotated[Any, Ignored("nothing is padded")] = None


class ResponseFields(RequestFields):
    """OpenAI's fields, and those of vLLM's that chat has too."""

    input: Any  # str | list of items; checked by hand
    instructions: str | None = None
    stream: bool = False
    stream_options: Annotated[ResponseStreamOptions, BeforeValidator(without_null)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_logprobs: NumLogprobs = 0
    include: list[str] = []
    text: Any = None  # {"format": ...}
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: Annotated[ReasoningFields, BeforeValidator(without_null)] | None = None
    metadata: dict[str, Any] = {}
    store: Annotated[Any, Refused(_NO_STORE, (False,))] = None
    previous_response_id: Annotated[Any, Refused(_NO_STORE)] = None
    conversation: Annotated[Any, Refused(_NO_STORE)] = None
    background: Annotated[Any, Refused(f"every answer is waited for, as {_NO_STORE}", (False,))] = None
    prompt: Annotated[Any, Refused("no prompts are kept here: send `instructions` and `input`")] = None
    truncation: Annotated[Any, Refused("what is too long is refused: leave items out", ("disabled",))] = None
    context_management: Annotated[Any, Refused("what is too long is refused: leave items out", ([],))] = None
    moderation: Annotated[Any, Refused("answers are not moderated: leave it out")] = None
    image: Annotated[Any, Refused("models here read and write text only")] = None
    access_programs: Annotated[Any, Ignored("has a meaning for OpenAI's own models only")] = None
    max_tool_calls: Annotated[Any, Ignored("counts calls of the server's own tools, and there are none")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see `priority`")] = None
    safety_identifier: Annotated[Any, Ignored("nobody is reported; `user` names your end user")] = None
    prompt_cache_key: Annotated[Any, Ignored("prompts are found again by their tokens")] = None
    prompt_cache_options: Annotated[Any, Ignored("prompts are found again by their tokens")] = None
    prompt_cache_retention: Annotated[Any, Ignored("prompts are found again by their tokens")] = None

    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    logit_bias: Biases = Field(default_factory=tuple)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = Field(default_factory=tuple)
    stop_token_ids: StopIds = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    request_id: Annotated[Any, Ignored("requests are told apart by the server's own ids")] = None
    chat_template_kwargs: TemplateValues = {}
