"""POST /inference/v1/generate"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lora_serve.server.schemas.fields import MAX_SALT_LENGTH, without_null
from lora_serve.server.schemas.generation import StreamOptions
from lora_serve.server.schemas.markers import Ignored, Refused
from lora_serve.server.schemas.request import RequestFields


class GenerateFields(RequestFields):
    """vLLM's fields: a prompt as token ids, to be answered by token ids."""

    token_ids: Any  # list[int]; checked by hand
    sampling_params: dict[str, Any] = {}  # of vLLM's names, checked as the fields of a completion
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_null)] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_LENGTH)
    features: Annotated[Any, Refused("models here read and write text only")] = None
    request_id: Annotated[Any, Ignored("requests are told apart by the server's own ids")] = None
    kv_transfer_params: Annotated[Any, Ignored("no key or value is moved between servers")] = None
