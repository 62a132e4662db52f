"""POST /v1/responses: the Responses API as a translation of a chat and of its answer.

Names and order of the events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import UNSET

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.answers import WireError, as_given
from lora_serve.server.background.tasks import LONG
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.responses import protocol as wire
from lora_serve.server.openai.responses.protocol import ResponseFields
from lora_serve.server.openai.translated import TranslatedBody, TurnItem, fields_in_common, with_names
from lora_serve.server.schemas.constraints import is_left_out
from lora_serve.server.schemas.generated import TokenLogprob
from lora_serve.server.services import SERVICES

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
Message = dict[str, Any]
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
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


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer in the form of OpenAI's Responses."""
    given = await read_json(request)
    fields = check_fields(ResponseFields, given, request.app[SERVICES].config)
    size = LONG + 1 if isinstance(fields.input, list) and len(fields.input) > 100 else 0
    asked = await thread_if_long(size, lambda: chat_fields(fields, given))
    with with_names(NAMES):
        chat = await chat_of(request, asked)
    body = ResponseBody(id=f"resp_{chat.context.request_id}", chat=chat, asked=fields, **chat.shared_fields())
    return await answer(request, body)


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


def messages_of(value: Any, instructions: str | None) -> list[Message]:
    """`input` and `instructions` as messages. Raises InvalidRequestError."""
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("`input` must be a text or a list of items.", param="input")
    reader = _Reader(messages)
    for index, item in enumerate(value):
        reader.read(item, f"input[{index}]")
    reader.end()
    return messages


class _Reader:
    """Puts items together that are one message: the assistant's reasoning, its text and its calls."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._turn: Message | None = None  # the assistant's, to which more may come

    def read(self, item: Any, where: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, where)
            case "custom_tool_call" | "local_shell_call":  # of tools that are left out now
                name = item.get("name") or "local_shell"
                given = item.get("action") if kind == "local_shell_call" else {"input": item.get("input")}
                self._call({**item, "name": name, "arguments": json.dumps(given, ensure_ascii=False)}, where)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self.end()
                content = _content(item.get("output"), f"{where}.output")
                self._messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "web_search_call":
                pass  # it holds no text: what came of it is in the message that follows
            case "item_reference":
                raise _wrong(where, "answers are not stored, so send the item itself")
            case _:
                raise _wrong(where, "only messages, reasoning, and calls of tools with their outputs are known")

    def end(self) -> None:
        """The assistant's turn is over."""
        if self._turn is not None and self._turn.keys() != {"role", "reasoning_content"}:
            self._messages.append({"content": None, **self._turn})
        self._turn = None

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.end()
            self._messages.append({"role": role, "content": content})
            return
        if self._turn is None or self._turn.keys() & {"content", "tool_calls"}:
            self.end()
            self._turn = {"role": "assistant"}
        self._turn["content"] = content

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        self.end()
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise _wrong(f"{where}.content", "a list of texts is expected")
        self._turn = {"role": "assistant", "reasoning_content": "\n".join(str(part.get("text", "")) for part in parts)}

    def _call(self, item: dict[str, Any], where: str) -> None:
        for name in ("name", "arguments", "call_id"):
            if not isinstance(item.get(name), str):
                raise _wrong(f"{where}.{name}", "a text is expected")
        if self._turn is None:
            self._turn = {"role": "assistant"}
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = self._turn.setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})


def _content(content: Any, where: str) -> Any:
    """A text, or parts in chat's form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a text or a list of parts is expected")
    parts = []
    for index, part in enumerate(content):
        name = _TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if name is None or not isinstance(part.get(name), str):
            raise _wrong(f"{where}[{index}]", "only texts are read: this model takes no images, files or sounds")
        parts.append({"type": "text", "text": part[name]})
    return parts or ""


def _wrong(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{where}`: {message}.", param=where)


@dataclass(slots=True, kw_only=True)
class ResponseBody(TranslatedBody):
    """Items of output, numbered as they come."""

    asked: ResponseFields
    num_events: int = 0

    def begun(self) -> Iterator[wire.ResponseEvent]:
        for name in ("created", "in_progress"):
            yield self._named(name, response=self._response("in_progress", []))

    def opened(self, item: TurnItem) -> Iterator[wire.ResponseEvent]:
        yield self._named("output_item.added", output_index=item.number, item=self._item(item, "in_progress"))
        if item.kind != "call":
            yield self._named("content_part.added", **self._place(item), part=_part(item, ""))

    def grown(self, item: TurnItem, text: str, logprobs: list[TokenLogprob]) -> Iterator[wire.ResponseEvent]:
        yield self._of_part(item, "delta", delta=text, logprobs=logprobs if item.kind == "text" else UNSET)

    def closed(self, item: TurnItem) -> Iterator[wire.ResponseEvent]:
        if item.kind == "call":
            yield self._of_part(item, "done", name=item.name, arguments=item.text)
        else:
            logprobs = item.logprobs if item.kind == "text" else UNSET
            yield self._of_part(item, "done", text=item.text, logprobs=logprobs)
            yield self._named("content_part.done", **self._place(item), part=_part(item, item.text))
        yield self._named("output_item.done", output_index=item.number, item=self._item(item, self._status))

    def ended(self) -> Iterator[wire.ResponseEvent]:
        if not self.items:  # the model said nothing, which is a text too
            item = TurnItem("text", 0)
            self.items.append(item)
            yield from self.opened(item)
            yield from self.closed(item)
        yield self._named(self._status, response=self.shown())

    def shown(self) -> wire.Response:
        *whole, last = self.items
        output = [*(self._item(item, "completed") for item in whole), self._item(last, self._status)]
        return self._response(self._status, output)

    def error_chunk(self, error: WireError) -> wire.ResponseError:
        message, number = error.message, self.num_events
        return wire.ResponseError(code=error.code, message=message, param=error.param, sequence_number=number)

    @property
    def _status(self) -> wire.Status:
        return "incomplete" if self.is_cut else "completed"

    def _named(self, name: str, /, **parts: Any) -> wire.ResponseEvent:
        self.num_events += 1
        return wire.ResponseEvent(type=f"response.{name}", sequence_number=self.num_events - 1, **parts)

    def _of_part(self, item: TurnItem, what: str, /, **parts: Any) -> wire.ResponseEvent:
        name = "function_call_arguments" if item.kind == "call" else _PARTS[item.kind]
        return self._named(f"{name}.{what}", **self._place(item), **parts)

    def _place(self, item: TurnItem) -> dict[str, Any]:
        place = {"item_id": self._id(item), "output_index": item.number}
        return place if item.kind == "call" else {**place, "content_index": 0}

    def _id(self, item: TurnItem) -> str:
        return f"{_PREFIXES[item.kind]}_{self.context.request_id}_{item.number}"

    def _item(self, item: TurnItem, status: wire.Status) -> wire.OutputItem:
        """An item of output; while it is in progress it is empty."""
        name, is_begun = self._id(item), status == "in_progress"
        if item.kind == "call":
            return wire.FunctionCallItem(name, status, item.call_id, item.name, "" if is_begun else item.text)
        content: list[Any] = [] if is_begun else [_part(item, item.text)]
        if item.kind == "reasoning":
            return wire.ReasoningItem(id=name, status=status, content=content)
        return wire.OutputMessage(id=name, status=status, content=content)

    def _response(self, status: wire.Status, output: list[wire.OutputItem]) -> wire.Response:
        asked, reasoning = self.asked, self.asked.reasoning
        return wire.Response(
            id=self.id,
            created_at=self.created,
            status=status,
            incomplete_details=wire.IncompleteDetails() if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=as_given(asked.metadata),
            model=self.model_name,
            output=output,
            parallel_tool_calls=self.chat.fields.parallel_tool_calls,
            reasoning=wire.AskedReasoning(None if reasoning is None else reasoning.effort),
            temperature=self.fields.temperature,
            text=as_given(asked.text or {"format": {"type": "text"}}),
            tool_choice="auto" if asked.tool_choice is None else as_given(asked.tool_choice),
            tools=as_given([tool for tool in asked.tools or () if not is_left_out(tool)]),
            top_logprobs=asked.top_logprobs,
            top_p=self.fields.top_p,
            usage=None if status == "in_progress" else self._usage(),
            user=asked.user,
        )

    def _usage(self) -> wire.ResponseUsage:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return wire.ResponseUsage(
            input_tokens=num_prompt_tokens,
            input_tokens_details=wire.InputDetails(num_cached),
            output_tokens=num_generated,
            output_tokens_details=wire.OutputDetails(self.chat.choices[0].num_reasoning_tokens),
            total_tokens=num_prompt_tokens + num_generated,
        )


def _part(item: TurnItem, text: str) -> wire.OutputPart:
    return wire.OutputText(text, [], item.logprobs if text else []) if item.kind == "text" else wire.ReasoningText(text)
