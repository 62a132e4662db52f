"""POST /v1/responses"""

from __future__ import annotations

from aiohttp import web

from lora_serve.server.background.tasks import LONG
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.renaming import with_names
from lora_serve.server.openai.responses.body import ResponseBody
from lora_serve.server.openai.responses.request import NAMES, chat_fields
from lora_serve.server.schemas.responses import ResponseFields
from lora_serve.server.services import SERVICES


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer in the form of OpenAI's Responses."""
    given = await read_json(request)
    fields = check_fields(ResponseFields, given, request.app[SERVICES].config.requests)
    size = LONG + 1 if isinstance(fields.input, list) and len(fields.input) > 100 else 0
    asked = await thread_if_long(size, lambda: chat_fields(fields, given))
    with with_names(NAMES):
        rows, chat = await chat_of(request, asked)
    context = request[CONTEXT]
    body = ResponseBody(
        id=f"resp_{context.request_id}",
        chunk_kind="response",
        context=context,
        fields=chat.fields,
        use=rows.use,
        shown_tokens=chat.shown_tokens,
        chat=chat,
        asked=fields,
    )
    return await answer(request, chat.fields, rows, body)
