"""The places that a chat template has for tools, for calls and for their results: found by trying, once per template.

A template that does not know tools leaves them out without a word, and the model would never hear of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jinja2

from lora_serve.text.past_calls import CallForm, PastCall, written_call, written_id

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
Conversation = Sequence[Mapping[str, Any]]
Render = Callable[[Conversation, Sequence[Mapping[str, Any]]], str]  # messages, tools

_NAME, _KEY, _VALUE, _RESULT = "probe_of_a_tool", "probe_of_a_key", "probe of a value", "probe of a result"
_USER = {"role": "user", "content": "Hi"}
_PARAMETERS = {
    "type": "object",
    "properties": {_KEY: {"type": "string", "description": "A key."}},
    "required": [_KEY],
}
_TOOLS = ({"type": "function", "function": {"name": _NAME, "description": "Probes.", "parameters": _PARAMETERS}},)
_CALL = PastCall(_NAME, {_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}', "call_of_the_probe")


@dataclass(frozen=True, slots=True)
class ToolForms:
    """The forms of one template; None or false: it has no place for them."""

    has_tools: bool
    calls: CallForm | None
    has_results: bool

    @property
    def short_ids(self) -> bool:
        """True if ids of calls must be short (`past_calls.SHORT_ID_LENGTH`)."""
        return self.calls is not None and self.calls.short_ids


def tool_forms(render: Render) -> ToolForms:
    """Try a template; `render` raises what the template raises."""
    has_tools = any(_NAME in text for text in _texts(render, _TOOLS))
    tools = _TOOLS if has_tools else ()
    written = [(form, text) for form in _CALL_FORMS if (text := _with_call(render, form, tools)) is not None]
    # JSON with its own quotation marks is better than what Python, or an escape, makes of it.
    best = [form for form, text in written if f'"{_KEY}"' in text] + [form for form, _ in written]
    results = [form for form, text in written if _RESULT in text]
    form = next((form for form in best if form in results), next(iter(best), None))
    return ToolForms(has_tools, form, form in results)


_CALL_FORMS = tuple(
    CallForm(has_content, as_text, short_ids)
    for short_ids, as_text, has_content in product((False, True), (False, True), (True, False))
)


def _texts(render: Render, tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    chats: tuple[Conversation, ...] = ((_USER,), ({"role": "system", "content": "Be kind."}, _USER))
    for chat in chats:
        try:
            yield render(chat, tools)
        except REFUSALS:
            continue


def _with_call(render: Render, form: CallForm, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of a chat with a call and its result; None if the call is not in it."""
    call = {"role": "assistant", "tool_calls": [written_call(_CALL, form)]}
    result = {"role": "tool", "tool_call_id": written_id(_CALL.id, form), "name": _NAME, "content": _RESULT}
    chat: list[Mapping[str, Any]] = [_USER, call | ({"content": ""} if form.has_content else {}), result]
    for messages in (chat, chat[:2]):
        try:
            text = render(messages, tools)
            bare = render([_USER], tools)
        except REFUSALS:
            continue
        if text.count(_NAME) > bare.count(_NAME) and _VALUE in text:
            return text
    return None
