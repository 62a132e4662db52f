"""POST /tokenize, POST /detokenize, POST /inference/v1/generate"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import MAX_SALT_LENGTH, Ignored, Objects, Refused, without_null
from lora_serve.server.schemas.generation import ChatFields, StreamOptions
from lora_serve.server.schemas.request import NamingFields, RequestFields

MAX_TOKEN_IDS = 2_000_000
_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_TOKEN_IDS}
TokenIds = Annotated[Any, WithJsonSchema(_LIST)]  # see `check_token_ids`


class TokenizeTextFields(NamingFields):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(ChatFields):
    messages: Objects
    return_token_strs: bool = False


class DetokenizeFields(NamingFields):
    tokens: TokenIds


def check_token_ids(value: Any) -> Sequence[int]:
    """The `tokens` of a request, checked by hand, as pydantic checks a list in one go and keeps every thread waiting.

    Raises InvalidRequestError.
    """
    if not isinstance(value, list | array):
        raise _wrong("tokens", "Input should be a valid list")
    if len(value) > MAX_TOKEN_IDS:
        raise _wrong("tokens", f"List should have at most {MAX_TOKEN_IDS} items, not {len(value)}")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise _wrong(f"tokens[{index}]", "Input should be a valid integer")
        if token_id < 0:
            raise _wrong(f"tokens[{index}]", "Input should be greater than or equal to 0")
    return value


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {message}", param=param)


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
