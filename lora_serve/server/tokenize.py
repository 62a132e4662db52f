"""POST /tokenize, POST /detokenize, GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from lora_serve.server.answers.json_answer import json_answer, json_response
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.inference.prompts import chat_messages, chat_prompt, encode
from lora_serve.server.inference.reading import asked_tools
from lora_serve.server.inference.requests import check_vocabulary
from lora_serve.server.inference.resolve import named_tokenizer
from lora_serve.server.schemas.answers.generation import Text, Tokens
from lora_serve.server.schemas.tokenize import (
    DetokenizeFields,
    TokenizeChatFields,
    TokenizeTextFields,
    check_token_ids,
)
from lora_serve.server.services import SERVICES


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Turn a text or a chat into token ids.

    A `prompt`, or `messages` as chat would render them.
    """
    body = await read_json(request)
    fields: TokenizeTextFields | TokenizeChatFields
    if "messages" in body:
        fields = check_fields(TokenizeChatFields, body)
        text, spec = named_tokenizer(request, fields)
        messages, tools = await chat_messages(fields.messages), await asked_tools(fields)
        token_ids = await chat_prompt(text, spec, fields, messages, tools)
    else:
        fields = check_fields(TokenizeTextFields, body)
        text, spec = named_tokenizer(request, fields)
        token_ids = await encode(text, spec, fields.prompt, fields.add_special_tokens)
    with_spelling = fields.return_token_strs

    def made() -> Tokens:
        spelled = [text.token(token_id) for token_id in token_ids] if with_spelling else None
        return Tokens(len(token_ids), spec.max_model_len, token_ids, spelled)

    return await json_answer(request, made, len(token_ids))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Turn token ids into text.

    Special tokens are shown.
    """
    fields = check_fields(DetokenizeFields, await read_json(request))
    token_ids = await asyncio.to_thread(check_token_ids, fields.tokens)
    text, spec = named_tokenizer(request, fields)

    def decoded() -> str:
        check_vocabulary(token_ids, spec, "tokens")
        return text.decode(token_ids, skip_special_tokens=False)

    found = await asyncio.to_thread(decoded)
    return await json_answer(request, lambda: Text(found), len(found) // 8)


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """Describe the tokenizer."""
    return json_response(request.app[SERVICES].text.info())
