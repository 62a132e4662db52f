"""POST /tokenize, POST /detokenize"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lora_serve.server.schemas.chat import ChatFields
from lora_serve.server.schemas.fields import Fields, Name, TokenIds

MAX_TOKEN_IDS = 2_000_000


class TokenizeTextFields(Fields):
    model: Name | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(ChatFields):
    messages: Any
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    model: Name | None = None
    tokens: TokenIds = Field(max_length=MAX_TOKEN_IDS)
