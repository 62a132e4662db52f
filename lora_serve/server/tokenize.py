"""POST /tokenize, POST /detokenize, GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from lora_serve.core.adapter import AdapterRef
from lora_serve.server.json_body import check_fields
from lora_serve.server.openai.chosen import chooser_for, read_fields
from lora_serve.server.openai.prompts import chat_messages, chat_prompt, encode
from lora_serve.server.sampling import check_vocabulary
from lora_serve.server.schemas.tokenize import DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from lora_serve.server.services import SERVICES


async def tokenize(request: web.Request) -> web.StreamResponse:
    """A `prompt`, or `messages` as chat would render them."""
    services, body = request.app[SERVICES], await read_fields(request)
    fields: TokenizeTextFields | TokenizeChatFields
    if "messages" in body:
        fields = check_fields(TokenizeChatFields, body)
        adapter = _adapter_of(request, fields.model)
        messages = await chat_messages(fields.messages)
        token_ids = await chat_prompt(services.text_of(adapter), services.spec_of(adapter), fields, messages)
    else:
        fields = check_fields(TokenizeTextFields, body)
        adapter = _adapter_of(request, fields.model)
        token_ids = await encode(services.text_of(adapter), services.spec, fields.prompt, fields.add_special_tokens)
    spelled = (
        [services.text_of(adapter).token(token_id) for token_id in token_ids] if fields.return_token_strs else None
    )
    return web.json_response(
        {
            "count": len(token_ids),
            "max_model_len": services.spec.max_model_len,
            "tokens": token_ids,
            "token_strs": spelled,
        }
    )


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Special tokens are shown."""
    services = request.app[SERVICES]
    fields = check_fields(DetokenizeFields, await read_fields(request))
    adapter = _adapter_of(request, fields.model)
    check_vocabulary(fields.tokens, services.spec_of(adapter), "tokens")
    text = await asyncio.to_thread(services.text_of(adapter).decode, fields.tokens, skip_special_tokens=False)
    return web.json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    return web.json_response(request.app[SERVICES].text.info())


def _adapter_of(request: web.Request, model: str | None) -> AdapterRef | None:
    """Adapters may add tokens to the base's tokenizer. Raises AdapterNotFoundError."""
    found = None if model is None else chooser_for(request).find(model)
    return None if found is None else found.ref
