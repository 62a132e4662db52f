"""Chat messages -> prompt text by the base model's own template, with the places of the template's control tokens.

A template in a request is never used; an adapter's own one is where the operator allows it. A request's strings are
data: the text of a control token in them stays text. They all enter the template through `_with_texts`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.control_tokens import ControlTokens, RenderedChat, refused
from lora_serve.text.marked import Marked, Marks, true_text
from lora_serve.text.past_calls import (
    CallForm,
    PastCall,
    field_error,
    parse_calls,
    written_call,
    written_id,
    written_reasoning,
)
from lora_serve.text.template import REFUSALS, ChatTemplate, TemplateInput
from lora_serve.text.tokenizer import TextModel

ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")  # no control token's text
_PROBE = "ProbeOfARole"
Change = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; content parts are already joined."""

    role: str
    content: str  # empty: perhaps there is none, as beside `tool_calls`
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id: str | None = None  # of the call whose result a tool's message is


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """Check the `messages` of a request. Raises InvalidRequestError naming the message and the field."""
    if not isinstance(value, list) or not value:
        raise field_error("messages", " must be a list of at least one message.")
    return tuple(_parse_message(item, f"messages[{index}]") for index, item in enumerate(value))


def render_chat(
    text_model: TextModel,
    messages: tuple[ChatMessage, ...],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_values: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    check: Callable[[str], object] = str,
    hint: str = "",
) -> RenderedChat:
    """Render the prompt's text, special tokens included. Raises InvalidRequestError, and what `check` raises.

    `tools`: in OpenAI's form. `check` may refuse the text before it is searched for control tokens. `hint`: ends
    the refusal of what the template has no place for.
    """
    template = text_model.template
    source = template.tools_source if tools else template.source
    if not source:
        raise InvalidRequestError("The base model has no chat template: use /v1/completions instead.", param="messages")
    conversation = _conversation(messages, template, has_developer="developer" in source, hint=hint)
    if tools and not template.tool_forms.has_tools:
        message = (
            f"The {template.owner}'s chat template has no place for tools: leave `tools` out, or name another adapter. "
            "An answer as JSON needs no tools: send its schema as `response_format`."
        )
        raise InvalidRequestError(message + hint, param="tools")
    values = _checked(template_values or {}, text_model.wrapper.apply_chat_template)
    if documents:
        if not re.search(r"\bdocuments\b", source):
            message = f"The {template.owner}'s chat template has no place for `documents`: write them into a message."
            raise InvalidRequestError(message + hint, param="documents")
        values["documents"] = list(documents)
    given = TemplateInput(conversation, values, tools, add_generation_prompt, continue_final_message)
    _check_roles(source, template, given)
    with _refusals(template.owner):
        text = template.render(given)
    check(text)
    tokens = text_model.control_tokens
    if tokens is None:
        return RenderedChat(text)
    own: list[str] = []  # the request's strings

    def noted(one: str) -> str:
        own.append(one)
        return one

    _with_texts(given, noted)
    suspects = {one: characters for one in own if (characters := tokens.characters(one))}
    if not suspects:
        return RenderedChat(text)
    marks = Marks([source, *map(str, template.special_tokens.values()), *own])
    entering = _with_texts(given, lambda one: marks.put(one, suspects[one]) if one in suspects else one)
    with _refusals(template.owner):
        marked = template.render_marked(entering, marks)
    return _compared(tokens, text, marked, own)


def _check_roles(source: str, template: ChatTemplate, given: TemplateInput) -> None:
    """Raises InvalidRequestError for an unusual role that the template does not name, or does not write."""
    for index, message in enumerate(given.messages):
        if (role := message["role"]) not in ROLES:
            tried = [{**one, "content": _PROBE} if one is message else one for one in given.messages]
            with _refusals(template.owner):
                is_written = re.search(rf"""(["']){role}\1""", source) and _PROBE in template.render(
                    replace(given, messages=tried)
                )
            if not is_written:
                words = f" must be one of {', '.join(ROLES)}, or one that the {template.owner}'s chat template writes."
                raise field_error(f"messages[{index}].role", words)


def _compared(tokens: ControlTokens, text: str, marked: Marked, own: list[str]) -> RenderedChat:
    """The chat with marks holds the template's control tokens alone: all others in `text` come from the request.

    Raises InvalidRequestError.
    """
    found, written = tokens.found(text), tokens.found(str.__str__(marked))
    if true_text(marked) == text:
        return RenderedChat(text, None if found == written else tokens.places(str.__str__(marked)))
    # The template examined a text in a way that shows the marks, or wrote it in another spelling.
    if [token for _, token in found] != [token for _, token in written] or any(map(tokens.found, own)):
        raise refused()
    return RenderedChat(text)


def _conversation(
    messages: tuple[ChatMessage, ...], template: ChatTemplate, *, has_developer: bool, hint: str
) -> list[dict[str, Any]]:
    """The messages as templates read them. Raises InvalidRequestError if the template has no place for one of them."""
    form, names = CallForm(), dict[str, str]()
    if any(message.tool_calls or message.role == "tool" for message in messages):
        form = _form_of_calls(messages, template, hint)
        names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    numbers, ids = count(), dict[str, str]()
    conversation = []
    for message in _one_call_a_turn(messages) if form.one_a_turn else messages:
        content, reasoning = message.content, message.reasoning
        if message.tool_calls and form.one_text and content and reasoning:
            content, reasoning = f"{reasoning}\n{content}", None
        # `developer` is OpenAI's newer name of `system`; most templates know `system` only.
        role = "system" if message.role == "developer" and not has_developer else message.role
        written: dict[str, Any] = {"role": role, "content": content}
        if reasoning is not None:
            written |= written_reasoning(reasoning)
        if message.tool_calls:
            written["tool_calls"] = [written_call(call, form, next(numbers)) for call in message.tool_calls]
            ids |= {call.id: one["id"] for call, one in zip(message.tool_calls, written["tool_calls"], strict=True)}
            if not content and not form.has_content:
                del written["content"]
        if message.tool_call_id is not None:
            written["tool_call_id"] = ids.get(message.tool_call_id) or written_id(message.tool_call_id, form)
        if name := message.name or names.get(message.tool_call_id or ""):
            written["name"] = name
        conversation.append(written)
    return conversation


def _one_call_a_turn(messages: tuple[ChatMessage, ...]) -> Iterator[ChatMessage]:
    """The messages with each call in a turn of its own, and its result right behind it."""
    place = 0
    while place < len(messages):
        message, end = messages[place], place + 1
        if len(message.tool_calls) > 1:
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            yield from _apart(message, messages[place + 1 : end])
        else:
            yield message
        place = end


def _apart(message: ChatMessage, results: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """A turn of several calls as turns of one. A result belongs to the call of its id; without ids, to the next one."""
    *others, last = message.tool_calls
    for call in others:
        yield replace(message, tool_calls=(call,))
        own = [one for one in results if one.tool_call_id and one.tool_call_id == call.id]
        own = own or [one for one in results[:1] if not (one.tool_call_id and call.id)]
        yield from own
        results = [one for one in results if not any(one is its for its in own)]
        message = ChatMessage("assistant", "")
    yield replace(message, tool_calls=(last,))
    yield from results


def _form_of_calls(messages: tuple[ChatMessage, ...], template: ChatTemplate, hint: str) -> CallForm:
    """Raises InvalidRequestError."""
    forms = template.tool_forms
    for index, message in enumerate(messages):
        if message.tool_calls and forms.calls is None:
            text, where = "calls of tools", f"messages[{index}].tool_calls"
        elif message.role == "tool" and not forms.has_results:
            text, where = "messages of the role `tool`", f"messages[{index}].role"
        else:
            continue
        raise InvalidRequestError(f"The {template.owner}'s chat template has no place for {text}.{hint}", param=where)
    return forms.calls or CallForm()


def _parse_message(item: Any, where: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise field_error(where, " must be an object with `role` and `content`.")
    role = item.get("role")
    if role == "function" or item.get("function_call"):
        raise field_error(where, ": functions are OpenAI's older form of tools: use `tool_calls` and the role `tool`.")
    if not isinstance(role, str) or not _OTHER_ROLE.fullmatch(role):
        raise field_error(f"{where}.role", f" must be one of {', '.join(ROLES)}.")
    if item.get("audio") is not None:
        raise field_error(f"{where}.audio", ": this model reads text only.")
    if role == "assistant":
        return _parse_assistant(item, where)
    if item.get("tool_calls"):
        raise field_error(f"{where}.tool_calls", ": only the assistant's messages hold calls.")
    content, name = _parse_content(item.get("content"), f"{where}.content"), _text_of(item, "name", where)
    return ChatMessage(role, content, name, tool_call_id=_text_of(item, "tool_call_id", where))


def _parse_assistant(item: dict[str, Any], where: str) -> ChatMessage:
    """An answer may have no content: it called tools, or was a refusal."""
    calls = parse_calls(item.get("tool_calls"), f"{where}.tool_calls")
    content, refusal = item.get("content"), _text_of(item, "refusal", where)
    if content is None and (calls or refusal is not None):
        content = refusal or ""
    reasoning = _text_of(item, "reasoning_content", where) or _text_of(item, "reasoning", where)
    text = "" if content == [] and calls else _parse_content(content, f"{where}.content")
    return ChatMessage("assistant", text, _text_of(item, "name", where), reasoning, calls)


def _text_of(item: dict[str, Any], name: str, where: str) -> str | None:
    value = item.get(name)
    if not isinstance(value, str | None):
        raise field_error(f"{where}.{name}", " must be a string.")
    return value


def _parse_content(content: Any, where: str) -> str:
    """A string, or a list of text parts, joined by line breaks as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise field_error(where, " must be a string or a list of text parts.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise field_error(
                f"{where}[{index}]", ' must be {"type": "text", "text": ...}: this model reads text only.'
            )
        texts.append(text)
    return "\n".join(texts)


@contextmanager
def _refusals(owner: str) -> Iterator[None]:
    """Turn errors that a template raises into errors of the request."""
    try:
        yield
    except REFUSALS as error:
        message = f"The {owner}'s chat template refuses these messages: {error}"
        raise InvalidRequestError(message, param="messages") from error


def _with_texts(given: TemplateInput, change: Change) -> TemplateInput:
    """Messages, values and tools with `change` applied to each text of the request. Roles stay: they are the server's
    own words, which templates turn into control tokens.
    """
    messages = [
        {name: part if name == "role" else _changed(part, change) for name, part in message.items()}
        for message in given.messages
    ]
    values = {name: _changed(value, change) for name, value in given.values.items()}
    return replace(given, messages=messages, values=values, tools=_changed(given.tools, change))


def _changed(value: Any, change: Change) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_changed(key, change): _changed(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_changed(item, change) for item in value]
    return value


def _checked(values: Mapping[str, Any], render: Any) -> dict[str, Any]:
    """Refuse names that would change the way of rendering, such as the template's own text."""
    reserved = {*inspect.signature(render).parameters, "messages"}
    for name in values:
        if name in reserved:
            raise InvalidRequestError(
                f"`chat_template_kwargs` may not hold `{name[:64]}`.", param="chat_template_kwargs"
            )
    return dict(values)
