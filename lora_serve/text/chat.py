"""Chat messages -> prompt text by the base model's own template, with the places of the template's control tokens.

A template in a request or beside an adapter is never used. A request's strings are data: the text of a control token in
them stays text. They all enter the template through `_each_text`.
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
    """Render the prompt's text, special tokens included. Raises InvalidRequestError, and what `check` raises.

    `check` may refuse the text before it is searched for control tokens.
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
    given: list[str] = []  # the request's own strings

    def noted(one: str) -> str:
        given.append(one)
        return one

    _each_text(conversation, values, noted)
    suspects = {one: characters for one in given if (characters := tokens.characters(one))}
    if not suspects:
        return RenderedChat(text)
    marks = Marks([template.source, *map(str, template.special_tokens.values()), *given])
    entering = _each_text(conversation, values, lambda one: marks.put(one, suspects[one]) if one in suspects else one)
    with _refusals():
        marked = template.render_marked(*entering, marks, **ends)
    return _compared(tokens, text, marked, given)


def _compared(tokens: ControlTokens, text: str, marked: Marked, given: list[str]) -> RenderedChat:
    """The chat with marks holds the template's control tokens alone: all others in `text` come from the request.

    Raises InvalidRequestError.
    """
    found, written = tokens.found(text), tokens.found(str.__str__(marked))
    if true_text(marked) == text:
        return RenderedChat(text, None if found == written else tokens.places(str.__str__(marked)))
    # The template examined a text in a way that shows the marks, or wrote it in another spelling.
    if [token for _, token in found] != [token for _, token in written] or any(map(tokens.found, given)):
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
    """Turn errors that a template raises into errors of the request."""
    try:
        yield
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise InvalidRequestError(message, param="messages") from error


def _each_text(conversation: Conversation, values: Mapping[str, Any], change: Change) -> tuple[Conversation, Any]:
    """Messages and values with `change` applied to each text of the request. Roles stay: they are the server's own
    words, which templates turn into control tokens.
    """
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
    """`developer` is OpenAI's newer name of `system`; most templates know `system` only."""
    known = role != "developer" or "developer" in str(text_model.wrapper.chat_template)
    return role if known else "system"


def _checked(values: Mapping[str, TemplateValue], render: Any) -> dict[str, TemplateValue]:
    """Refuse names that would change the way of rendering, such as the template's own text."""
    reserved = {*inspect.signature(render).parameters, "messages"}
    for name in values:
        if name in reserved:
            raise InvalidRequestError(
                f"`chat_template_kwargs` may not hold `{name[:64]}`.", param="chat_template_kwargs"
            )
    return dict(values)
