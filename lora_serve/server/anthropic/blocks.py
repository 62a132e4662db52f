"""Messages of content blocks -> messages of a chat."""

from __future__ import annotations

import json
from typing import Any

from lora_serve.core.errors import InvalidRequestError

Message = dict[str, Any]
_SIGN = "x-anthropic-billing-header:"  # Claude Code's own, other in each request, as if no prompt were known before
_TEXTS = {"text": "text", "tool_reference": "tool_name"}  # the latter: what a search among tools has found


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
