"""POST /v1/messages and /v1/messages/count_tokens: the Messages API as a translation of a chat and of its answer.

Names and order of the events: https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import FinishReason
from lora_serve.server.answers import WireError, as_given, json_response
from lora_serve.server.anthropic import protocol as wire
from lora_serve.server.anthropic.protocol import CountTokensFields, MessageFields
from lora_serve.server.background.tasks import LONG
from lora_serve.server.inference.prompts import chat_messages, chat_prompt, thread_if_long
from lora_serve.server.inference.reading import asked_tools
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.openai.answering import answer
from lora_serve.server.openai.chat import chat_of
from lora_serve.server.openai.translated import TranslatedBody, TurnItem, fields_in_common, with_names
from lora_serve.server.schemas.generated import TokenLogprob
from lora_serve.server.schemas.inference import ChatFields
from lora_serve.server.services import SERVICES

Message = dict[str, Any]
_SIGN = "x-anthropic-billing-header:"  # Claude Code's own, other in each request, as if no prompt were known before
_TEXTS = {"text": "text", "tool_reference": "tool_name"}  # the latter: what a search among tools has found
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


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer in the form of Anthropic's Messages."""
    given = await read_json(request)
    fields = check_fields(MessageFields, given, request.app[SERVICES].config)
    asked = await _asked(fields, given)
    with with_names(NAMES):
        chat = await chat_of(request, asked)
    edits = UNSET if fields.context_management is None else wire.AppliedEdits()
    body = MessageBody(id=f"msg_{chat.context.request_id}", chat=chat, edits=edits, **chat.shared_fields())
    return await answer(request, body)


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
    edits = UNSET if counted.context_management is None else wire.CountedEdits(len(prompt))
    return json_response(wire.TokenCount(len(prompt), edits))


async def _asked(fields: CountTokensFields, given: dict[str, Any]) -> dict[str, Any]:
    is_long = isinstance(fields.messages, list) and len(fields.messages) > MANY
    return await thread_if_long(LONG + 1 if is_long else 0, lambda: chat_fields(fields, given))


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
    """A model that can think does so unless it is told not to, and if it does all the same, nothing of it is shown; how
    much is not limited apart from `max_tokens`.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if value is not None and kind not in ("enabled", "adaptive", "disabled"):
        raise _wrong("thinking.type", "must be enabled, adaptive or disabled")
    return {"reasoning_effort": "none", "include_reasoning": False} if kind == "disabled" else {}


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


def messages_of(value: Any, system: Any) -> list[Message]:
    """`messages` and `system` as messages of a chat. Raises InvalidRequestError."""
    messages: list[Message] = []
    if isinstance(system, list):
        system = [one for one in system if not str(isinstance(one, dict) and one.get("text")).startswith(_SIGN)] or None
    if system is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "must be a list of at least one message")
    for index, item in enumerate(value):
        where = f"messages[{index}]"
        role = item.get("role") if isinstance(item, dict) else None
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{where}.role", "must be user or assistant")
        content = item.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        if not isinstance(content, list):
            raise _wrong(f"{where}.content", "must be a text or a list of blocks")
        blocks = [_checked(block, f"{where}.content[{number}]") for number, block in enumerate(content)]
        messages += [_assistant(blocks)] if role == "assistant" else _others(role, blocks)
    return messages


def _checked(block: Any, where: str) -> tuple[dict[str, Any], str]:
    """The block and its place."""
    if not isinstance(block, dict):
        raise _wrong(where, "must be a block with a `type`")
    return block, where


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    """Thoughts that are hidden from us hold nothing to read."""
    texts, thoughts, calls = list[str](), list[str](), list[Any]()
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", where))
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": _string(block, "name", where), "arguments": arguments}
                calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
            case _:
                raise _wrong(where, "must be text, thinking or tool_use in an assistant's message")
    message: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _others(role: str, blocks: list[tuple[dict[str, Any], str]]) -> list[Message]:
    """Results of tools are messages of their own; texts that follow one another are one."""
    messages: list[Message] = []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            content = _text(block.get("content") or "", f"{where}.content")
            shown = f"Error: {content}" if block.get("is_error") is True else content
            messages.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": shown})
        elif kind == "text":
            text = {"type": "text", "text": _string(block, "text", where)}
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(text)
        else:
            raise _wrong(where, "must be text or tool_result: this model reads text only")
    return messages or [{"role": role, "content": ""}]


def _text(value: Any, where: str) -> str:
    """A text, or text blocks joined by line breaks, as the parts of a chat's message are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "must be a text or a list of text blocks")
    texts = []
    for index, block in enumerate(value):
        name = _TEXTS.get(str(block.get("type"))) if isinstance(block, dict) else None
        if name is None:
            raise _wrong(f"{where}[{index}]", "must be a text block: this model reads text only")
        texts.append(_string(block, name, f"{where}[{index}]"))
    return "\n".join(texts)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a text")
    return value


def _wrong(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{where}` {message}.", param=where)


@dataclass(slots=True, kw_only=True)
class MessageBody(TranslatedBody):
    """Content blocks, numbered as they come."""

    edits: wire.AppliedEdits | UnsetType

    def begun(self) -> Iterator[wire.MessageEvent]:
        yield wire.MessageEvent(type="message_start", message=self._message([]))

    def opened(self, item: TurnItem) -> Iterator[wire.MessageEvent]:
        yield wire.MessageEvent(type="content_block_start", index=item.number, content_block=_block(item, "", {}))

    def grown(self, item: TurnItem, text: str, logprobs: list[TokenLogprob]) -> Iterator[wire.MessageEvent]:
        match item.kind:
            case "text":
                yield _delta(item, "text_delta", text=text)
            case "reasoning":
                yield _delta(item, "thinking_delta", thinking=text)
            case "call":
                yield _delta(item, "input_json_delta", partial_json=text)

    def closed(self, item: TurnItem) -> Iterator[wire.MessageEvent]:
        if item.kind == "reasoning":
            yield _delta(item, "signature_delta", signature="")
        yield wire.MessageEvent(type="content_block_stop", index=item.number)

    def ended(self) -> Iterator[wire.MessageEvent]:
        stop = wire.BlockDelta(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
        yield wire.MessageEvent(type="message_delta", delta=stop, usage=self._usage(), context_management=self.edits)
        yield wire.MessageEvent(type="message_stop")

    def shown(self) -> wire.AnthropicMessage:
        return self._message([_block(item, item.text, _input(item)) for item in self.items])

    def error_chunk(self, error: WireError) -> wire.AnthropicError:
        return wire.anthropic_error(error, self.context.request_id)

    def _message(self, content: list[wire.Block]) -> wire.AnthropicMessage:
        return wire.AnthropicMessage(
            id=self.id,
            model=self.model_name,
            content=content,
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop_sequence(),
            usage=self._usage(),
            context_management=self.edits,
        )

    def _stop_reason(self) -> wire.StopReason | None:
        """In Anthropic's words; None: the answer has not ended."""
        if self.finish_reason is None:
            return None
        if self.finish_reason == FinishReason.LENGTH:
            return "max_tokens"
        if any(item.kind == "call" for item in self.items):
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def _usage(self) -> wire.MessageUsage:
        num_prompt_tokens, num_generated, num_cached = self.use.counts()
        return wire.MessageUsage(
            input_tokens=num_prompt_tokens - num_cached, cache_read_input_tokens=num_cached, output_tokens=num_generated
        )


def _delta(item: TurnItem, kind: str, **part: Any) -> wire.MessageEvent:
    return wire.MessageEvent(type="content_block_delta", index=item.number, delta=wire.BlockDelta(type=kind, **part))


def _block(item: TurnItem, text: str, arguments: dict[str, Any]) -> wire.Block:
    match item.kind:
        case "text":
            return wire.TextBlock(text)
        case "reasoning":
            return wire.ThinkingBlock(text)
        case "call":
            return wire.ToolUseBlock(item.call_id, item.name, as_given(arguments))


def _input(item: TurnItem) -> dict[str, Any]:
    """The arguments of a call; empty if they were cut, which the message's `stop_reason` tells."""
    try:
        value = json.loads(item.text) if item.kind == "call" else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
