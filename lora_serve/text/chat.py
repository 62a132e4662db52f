"""Chat messages -> prompt text, by the base model's own template only.

transformers renders the template in jinja2's immutable sandbox. A template in a request or beside an adapter is never
used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.tokenizer import TextModel

ROLES = ("system", "developer", "user", "assistant")
TemplateValue = str | int | float | bool | None


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
) -> str:
    """The prompt's text; it holds the special tokens already. Raises InvalidRequestError."""
    tokenizer: Any = text_model.wrapper
    if not tokenizer.chat_template:
        raise InvalidRequestError("The base model has no chat template: use /v1/completions instead.", param="messages")
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": _role(text_model, message.role), "content": message.content} for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **_checked(template_values or {}, tokenizer.apply_chat_template),
        )
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise InvalidRequestError(message, param="messages") from error
    return str(rendered)


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
