"""Chat messages -> prompt text by the base model's own template only, and the places of the template's control tokens.

A template in a request or beside an adapter is never used. What a request says is data: the text of a control token in
it stays text. All strings of a request that enter the template do so by `_each_text`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.control_tokens import ControlTokens, RenderedChat, refused
from lora_serve.text.marked import Marked, Marks, true_text
from lora_serve.text.template import Conversation
from lora_serve.text.tokenizer import TextModel

ROLES = ("system", "developer", "user", "assistant")
TemplateValue = str | int | float | bool | None
Change = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; content parts are already joined."""

    role: str
    content: str


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Check the `messages` of a request. Raises InvalidRequestError naming the message and the field."""
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("`messages` must be a list of at least one message.", param="messages")
    return tuple(_parse_message(item, f"messages[{index}]") for index, item in enumerate(value))


def render_chat(
    text_model: TextModel,
    messages: tuple[ChatMessage, ...],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_values: Mapping[str, TemplateValue] | None = None,
    check: Callable[[str], object] = str,
) -> RenderedChat:
    """The prompt's text; it holds the special tokens already. Raises InvalidRequestError, and what `check` raises.

    `check`: may refuse the text before control tokens are looked for in it.
    """
    template = text_model.template
    if not template.source:
        raise InvalidRequestError("The base model has no chat template: use /v1/completions instead.", param="messages")
    conversation = [{"role": _role(text_model, message.role), "content": message.content} for message in messages]
    values = _checked(template_values or {}, text_model.wrapper.apply_chat_template)
    ends: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "is_continued": continue_final_message}
    with _refusals():
        text = template.render(conversation, values, **ends)
    check(text)
    tokens = text_model.control_tokens
    if tokens is None:
        return RenderedChat(text)
    said: list[str] = []

    def noted(one: str) -> str:
        said.append(one)
        return one

    _each_text(conversation, values, noted)
    suspects = {one: characters for one in said if (characters := tokens.characters(one))}
    if not suspects:
        return RenderedChat(text)
    marks = Marks([template.source, *map(str, template.special_tokens.values()), *said])
    entering = _each_text(conversation, values, lambda one: marks.put(one, suspects[one]) if one in suspects else one)
    with _refusals():
        marked = template.render_marked(*entering, marks, **ends)
    return _compared(tokens, text, marked, said)


def _compared(tokens: ControlTokens, text: str, marked: Marked, said: list[str]) -> RenderedChat:
    """With marks a chat holds the template's control tokens alone: whatever it holds more comes from what is said.

    Raises InvalidRequestError.
    """
    found, written = tokens.found(text), tokens.found(str.__str__(marked))
    if true_text(marked) == text:
        return RenderedChat(text, None if found == written else tokens.places(str.__str__(marked)))
    # The template looked at a text in a way that saw its marks, or spelled them otherwise.
    if [token for _, token in found] != [token for _, token in written] or any(map(tokens.found, said)):
        raise refused()
    return RenderedChat(text)


def _parse_message(item: Any, where: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"`{where}` must be an object with `role` and `content`.", param=where)
    role = item.get("role")
    if role in ("tool", "function") or item.get("tool_calls") or item.get("function_call"):
        raise InvalidRequestError(f"`{where}`: tool calls are not supported yet; they come later.", param=where)
    if role not in ROLES:
        raise InvalidRequestError(f"`{where}.role` must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    return ChatMessage(role, _parse_content(item.get("content"), f"{where}.content"))


def _parse_content(content: Any, where: str) -> str:
    """A string, or a list of text parts, joined by line breaks as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"`{where}` must be a string or a list of text parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f'`{where}[{index}]` must be {{"type": "text", "text": ...}}: this model reads text only.',
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template raises is the caller's error."""
    try:
        yield
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise InvalidRequestError(message, param="messages") from error


def _each_text(conversation: Conversation, values: Mapping[str, Any], change: Change) -> tuple[Conversation, Any]:
    """Messages and values with each text that the request says changed. Roles are the server's own words, of which
    templates make control tokens."""
    messages = [
        {name: part if name == "role" else _changed(part, change) for name, part in message.items()}
        for message in conversation
    ]
    return messages, {name: _changed(value, change) for name, value in values.items()}


def _changed(value: Any, change: Change) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_changed(key, change): _changed(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_changed(item, change) for item in value]
    return value


def _role(text_model: TextModel, role: str) -> str:
    """`developer` is OpenAI's newer name of `system`; most templates know only the latter."""
    known = role != "developer" or "developer" in str(text_model.wrapper.chat_template)
    return role if known else "system"


def _checked(values: Mapping[str, TemplateValue], render: Any) -> dict[str, TemplateValue]:
    """Refuse names that would change how, not what, the template renders (its text above all)."""
    reserved = {*inspect.signature(render).parameters, "messages"}
    for name in values:
        if name in reserved:
            raise InvalidRequestError(
                f"`chat_template_kwargs` may not hold `{name[:64]}`.", param="chat_template_kwargs"
            )
    return dict(values)
