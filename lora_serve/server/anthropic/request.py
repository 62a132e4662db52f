"""POST /v1/messages and /v1/messages/count_tokens: a request of the Messages API -> the fields of a chat."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import UNSET

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.answers.json_answer import json_response
from lora_serve.server.anthropic.blocks import messages_of
from lora_serve.server.anthropic.body import MessageBody
from lora_serve.server.background.tasks import LONG
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import chat_messages, chat_prompt, thread_if_long
from lora_serve.server.inference.reading import asked_tools
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.passing import fields_in_common
from lora_serve.server.openai.renaming import with_names
from lora_serve.server.schemas.answers.responses import AppliedEdits, CountedEdits, TokenCount
from lora_serve.server.schemas.generation import ChatFields
from lora_serve.server.schemas.messages import CountTokensFields, MessageFields
from lora_serve.server.services import SERVICES

MANY = 100  # messages
# Names of fields in a chat's errors, longer ones first -> in the caller's request.
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    ".function.parameters": ".input_schema",
    "parameters": "input_schema",
    ".function.": ".",
}
_TRANSLATED = frozenset(("messages", "tools", "tool_choice"))
_SAME = fields_in_common(MessageFields, _TRANSLATED)
_SAME_IN_PROMPTS = fields_in_common(CountTokensFields, _TRANSLATED)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"max": "xhigh"}  # chat has no word for it


def chat_fields(fields: CountTokensFields, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat that gives the answer. `given`: the body as it came. Raises InvalidRequestError."""
    same = _SAME if isinstance(fields, MessageFields) else _SAME_IN_PROMPTS
    asked = {name: given[name] for name in same if name in given}
    asked["messages"] = messages_of(fields.messages, fields.system)
    if asked["messages"][-1]["role"] == "assistant":  # its text is the beginning of the answer
        asked |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(fields, MessageFields):
        if fields.stop_sequences:
            asked["stop"] = list(fields.stop_sequences)
        if fields.metadata is not None and fields.metadata.user_id is not None:
            asked.setdefault("user", fields.metadata.user_id)
    return {**asked, **_thinking(fields.thinking), **_output(fields.output_config), **_tools(fields)}


def _thinking(value: Any) -> dict[str, Any]:
    """A model that can think does so unless it is told not to; how much is not limited apart from `max_tokens`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is not None and kind not in ("enabled", "adaptive", "disabled"):
        raise _wrong("thinking.type", "must be enabled, adaptive or disabled")
    return {"reasoning_effort": "none"} if kind == "disabled" else {}


def _output(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong("output_config", "must be an object")
    asked: dict[str, Any] = {}
    if (effort := value.get("effort")) is not None:
        asked["reasoning_effort"] = _EFFORTS.get(str(effort), effort)
    if (form := value.get("format")) is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise _wrong("output_config.format", 'must be {"type": "json_schema", "schema": ...}')
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    return asked


def _tools(fields: CountTokensFields) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if fields.tools:
        if not isinstance(fields.tools, list):
            raise _wrong("tools", "must be a list")
        asked["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if choice is None:
        return asked
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        asked["tool_choice"] = _CHOICES[kind]
    else:
        raise _wrong("tool_choice.type", "must be auto, any, tool or none")
    if choice.get("disable_parallel_tool_use") is True:
        asked["parallel_tool_calls"] = False
    return asked


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _wrong(where, "must have `name` and `input_schema`")
    if tool.get("type") not in ("custom", None):  # one of Anthropic's own
        return tool
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _wrong(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{where}` {message}.", param=where)


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer in the form of Anthropic's Messages."""
    given = await read_json(request)
    fields = check_fields(MessageFields, given, request.app[SERVICES].config)
    asked = await _asked(fields, given)
    with with_names(NAMES):
        rows, chat = await chat_of(request, asked)
    context = request[CONTEXT]
    body = MessageBody(
        id=f"msg_{context.request_id}",
        context=context,
        fields=chat.fields,
        use=rows.use,
        shown_tokens=chat.shown_tokens,
        chat=chat,
        edits=UNSET if fields.context_management is None else AppliedEdits(),
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
    edits = UNSET if counted.context_management is None else CountedEdits(len(prompt))
    return json_response(TokenCount(len(prompt), edits))


async def _asked(fields: CountTokensFields, given: dict[str, Any]) -> dict[str, Any]:
    is_long = isinstance(fields.messages, list) and len(fields.messages) > MANY
    return await thread_if_long(LONG + 1 if is_long else 0, lambda: chat_fields(fields, given))
