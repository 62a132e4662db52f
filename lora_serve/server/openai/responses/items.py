"""The items of `input`, former answers' items among them -> messages of a chat."""

from __future__ import annotations

import json
from typing import Any

from lora_serve.core.errors import InvalidRequestError

Message = dict[str, Any]
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}


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
