"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.server.anthropic.body import MessageBody
from lora_serve.server.anthropic.request import NAMES, chat_fields
from lora_serve.server.background.tasks import LONG
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import chat_messages, chat_prompt, thread_if_long
from lora_serve.server.inference.reading import asked_tools
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.renaming import with_names
from lora_serve.server.schemas.generation import ChatFields
from lora_serve.server.schemas.messages import CountTokensFields, MessageFields
from lora_serve.server.services import SERVICES

MANY = 100  # messages


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer in the form of Anthropic's Messages."""
    given = await read_json(request)
    fields = check_fields(MessageFields, given, request.app[SERVICES].config.requests)
    asked = await _asked(fields, given)
    with with_names(NAMES):
        rows, chat = await chat_of(request, asked)
    context = request[CONTEXT]
    body = MessageBody(
        id=f"msg_{context.request_id}",
        chunk_kind="message",
        context=context,
        fields=chat.fields,
        use=rows.use,
        shown_tokens=chat.shown_tokens,
        chat=chat,
        edits={} if fields.context_management is None else {"context_management": {"applied_edits": []}},
    )
    return await answer(request, chat.fields, rows, body)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens that the same prompt has in POST /v1/messages."""
    given = await read_json(request)
    counted = check_fields(CountTokensFields, given)
    asked = await _asked(counted, given)
    with with_names(NAMES):
        fields = check_fields(ChatFields, asked)
        messages, tools = await chat_messages(fields.messages), await asked_tools(fields)
        model = resolve(request, fields)
        prompt = await chat_prompt(model.text, model.spec, fields, messages, tools, model.hint)
    edits = {} if counted.context_management is None else {"context_management": {"original_input_tokens": len(prompt)}}
    return web.json_response({"input_tokens": len(prompt), **edits})


async def _asked(fields: CountTokensFields, given: dict[str, Any]) -> dict[str, Any]:
    is_long = isinstance(fields.messages, list) and len(fields.messages) > MANY
    return await thread_if_long(LONG + 1 if is_long else 0, lambda: chat_fields(fields, given))
