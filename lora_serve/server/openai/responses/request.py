"""POST /v1/responses: a request of the Responses API -> the fields of a chat."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.background.tasks import LONG
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.passing import fields_in_common
from lora_serve.server.openai.renaming import with_names
from lora_serve.server.openai.responses.body import ResponseBody
from lora_serve.server.openai.responses.items import messages_of
from lora_serve.server.schemas.responses import ResponseFields
from lora_serve.server.schemas.tools import is_left_out
from lora_serve.server.services import SERVICES

LOGPROBS = "message.output_text.logprobs"
# Reasoning is in the answer, and not encrypted; of tools that are left out there is nothing to include.
_INCLUDED = (
    LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip
_SAME = fields_in_common(
    ResponseFields, frozenset(("stream_options", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"))
)
# Names of fields in a chat's errors, longer ones first -> in the caller's request.
NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    ".function.": ".",
}


def chat_fields(fields: ResponseFields, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat that gives the answer. `given`: the body as it came. Raises InvalidRequestError."""
    asked = {name: given[name] for name in _SAME if name in given}
    asked["messages"] = messages_of(fields.input, fields.instructions)
    if fields.max_output_tokens is not None:
        asked["max_tokens"] = fields.max_output_tokens
    for name in fields.include:
        if name not in _INCLUDED:
            message = f"`include`: {name[:64]!r} cannot be included; {', '.join(_INCLUDED)} can."
            raise InvalidRequestError(message, param="include")
    if LOGPROBS in fields.include or fields.top_logprobs:
        asked |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        asked["reasoning_effort"] = fields.reasoning.effort
    return {**asked, **_format(fields.text), **_tools(fields, given)}


def _format(text: Any) -> dict[str, Any]:
    """`text` as `response_format`."""
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise InvalidRequestError("`text` must be an object with `format`.", param="text")
    form = text.get("format")
    if form is None:
        return {}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        return {"response_format": {"type": kind, "json_schema": schema}}
    if kind in ("json_object", "text"):
        return {} if kind == "text" else {"response_format": {"type": kind}}
    message = "`text.format` must be of the type text, json_object or json_schema."
    raise InvalidRequestError(message, param="text.format")


def _tools(fields: ResponseFields, given: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if fields.tools:
        if not isinstance(fields.tools, list):
            raise InvalidRequestError("`tools` must be a list.", param="tools")
        asked["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
        if "parallel_tool_calls" in given:
            asked["parallel_tool_calls"] = fields.parallel_tool_calls
    choice = fields.tool_choice
    if choice is not None and (fields.tools or choice not in ("auto", "none")):
        asked["tool_choice"] = _choice(choice)
    return asked


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if is_left_out(tool):
        return dict(tool)
    if not isinstance(tool, dict) or tool.get("type") != "function":
        message = f'`{where}` must be {{"type": "function", "name": ..., "parameters": ...}}.'
        raise InvalidRequestError(message, param=where)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    """The choice in chat's form, which puts names one level deeper; what it does not know is left to chat to refuse."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_choice(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer in the form of OpenAI's Responses."""
    given = await read_json(request)
    fields = check_fields(ResponseFields, given, request.app[SERVICES].config)
    size = LONG + 1 if isinstance(fields.input, list) and len(fields.input) > 100 else 0
    asked = await thread_if_long(size, lambda: chat_fields(fields, given))
    with with_names(NAMES):
        rows, chat = await chat_of(request, asked)
    context = request[CONTEXT]
    body = ResponseBody(
        id=f"resp_{context.request_id}",
        context=context,
        fields=chat.fields,
        use=rows.use,
        shown_tokens=chat.shown_tokens,
        chat=chat,
        asked=fields,
    )
    return await answer(request, chat.fields, rows, body)
