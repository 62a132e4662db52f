"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lora_serve.server.schemas.fields import Fields, Stops, TemplateValues, User, without_null
from lora_serve.server.schemas.generation import MAX_TOKENS
from lora_serve.server.schemas.markers import Ignored, Refused
from lora_serve.server.schemas.request import RequestFields


class MessageMetadata(Fields):
    """`metadata`"""

    user_id: User = None


class CountTokensFields(RequestFields):
    """The fields that make the prompt. Contents are checked by hand."""

    messages: Any
    system: Any = None  # str | list of text blocks
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: TemplateValues = {}
    mcp_servers: Annotated[Any, Refused("the server calls no tools itself: name functions in `tools`", ([],))] = None
    context_management: Annotated[Any, Refused("what is too long is refused: leave messages out")] = None
    cache_control: Annotated[Any, Ignored("prompts are found again by their tokens, wherever they agree")] = None
    speed: Annotated[Any, Ignored("there is one speed; see `priority`")] = None


class MessageFields(CountTokensFields):
    """The fields of an answer too."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Stops = Field(default_factory=tuple)
    stream: bool = False
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS)
    metadata: Annotated[MessageMetadata, BeforeValidator(without_null)] | None = None
    container: Annotated[Any, Refused("nothing is run in containers here")] = None
    inference_geo: Annotated[Any, Refused("this server computes where it stands")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see `priority`")] = None
    diagnostics: Annotated[Any, Ignored("nothing is diagnosed")] = None
    user_profile_id: Annotated[Any, Ignored("the key says who calls; `metadata` names your end user")] = None
    workspace_id: Annotated[Any, Ignored("the key says who calls")] = None
    kv_transfer_params: Annotated[Any, Ignored("no key or value is moved between servers")] = None
