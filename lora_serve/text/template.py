"""The base model's chat template, rendered by transformers in jinja2's immutable sandbox, and again with marks.

A model may have several templates by name: a chat with tools is rendered by `tool_use`, if there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_texts import template_in
from lora_serve.text import reasoning, tool_calls
from lora_serve.text.marked import Marked, Marks, joined
from lora_serve.text.past_calls import CallForm, PastCall, written_call, written_reasoning
from lora_serve.text.reasoning.base import ReasoningFormat
from lora_serve.text.tool_calls.base import ToolCallFormat

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Conversation, Tools], str]

_NAME, _KEY, _VALUE, _RESULT = "probe_of_a_tool", "probe_of_a_key", "probe of a value", "probe of a result"
_SECOND = "another_probe_of_calls"
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
    return ToolForms(has_tools, None if form is None else _refined(render, form, tools), form in results)


_CALL_FORMS = tuple(
    CallForm(has_content, as_text, *ids)
    for ids, as_text, has_content in product(((), (True,), (False, True)), (False, True), (True, False))
)


def _texts(render: Render, tools: Tools) -> Iterator[str]:
    chats: tuple[Conversation, ...] = ((_USER,), ({"role": "system", "content": "Be kind."}, _USER))
    for chat in chats:
        try:
            yield render(chat, tools)
        except REFUSALS:
            continue


def _with_call(render: Render, form: CallForm, tools: Tools) -> str | None:
    """The text of a chat with a call and its result; None if the call is not in it."""
    written = written_call(_CALL, form, 0)
    call = {"role": "assistant", "tool_calls": [written]}
    result = {"role": "tool", "tool_call_id": written["id"], "name": "another name", "content": _RESULT}
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


def _refined(render: Render, form: CallForm, tools: Tools) -> CallForm:
    """The form with what several calls, and a text beside one, show."""
    calls = [written_call(replace(_CALL, name=name, id=f"{_CALL.id}{name[-1]}"), form, 0) for name in (_NAME, _SECOND)]
    bare = {"role": "assistant", "content": ""}

    def is_lost(turn: Mapping[str, Any], text: str) -> bool | None:
        """None if the template refuses the turn."""
        try:
            return text not in render([_USER, turn], tools)
        except REFUSALS:
            return None

    one_a_turn = is_lost(bare | {"tool_calls": calls}, _SECOND) is True
    beside = bare | {"tool_calls": calls[:1], "content": _RESULT}
    one_text = is_lost(beside, _NAME) is False and is_lost(beside | written_reasoning(_VALUE), _NAME) is None
    return replace(form, one_a_turn=one_a_turn, one_text=one_text)


# transformers' own sign: it cuts the text where this stands, as `cut_continued` does
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A chat as a template is given it, and values of other variables. `is_continued`: its last message goes on."""

    messages: Conversation
    values: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools = ()
    add_generation_prompt: bool = True
    is_continued: bool = False

    def variables(self, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
        """All variables by name. A message that goes on ends with a sign, where `cut_continued` cuts."""
        messages = [dict(message) for message in self.messages]
        if self.is_continued:
            messages[-1]["content"] = messages[-1]["content"] + _CONTINUED
        names: dict[str, Any] = {"messages": messages, "tools": list(self.tools) or None, "documents": None}
        return names | {"add_generation_prompt": self.add_generation_prompt, **special_tokens, **self.values}


def template_text(given: str) -> str:
    """The operator's template: the text of a file, or `given` itself. Raises ConfigError for what jinja cannot read."""
    try:
        text = template_in(given)
        chat_template_utils._compile_jinja_template(text)  # noqa: SLF001 - it has no public name
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"--chat-template: {given[:200]!r} cannot be used: {str(error)[:300]}") from None
    return text


class ChatTemplate:
    """Renders messages. Raises whatever the template raises."""

    owner = "model"
    thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None  # runs what renders; None: any thread may

    def __init__(self, wrapper: PreTrainedTokenizerFast) -> None:
        self._wrapper: Any = wrapper

    @cached_property
    def source(self) -> str:
        """The template of a chat without tools; empty if the model has none."""
        return self._source(None)

    @cached_property
    def tools_source(self) -> str:
        """The template of a chat with tools, mostly the same one; empty if the model has none."""
        return self._source([])

    @cached_property
    def texts(self) -> dict[str, str]:
        """The templates by name; `default` is the name of one that has none."""
        found = self._wrapper.chat_template or {}
        return {"default": found} if isinstance(found, str) else dict(found)

    @cached_property
    def tool_forms(self) -> ToolForms:
        """The places that the template has for tools and calls. Tried once, which takes some milliseconds."""
        return tool_forms(lambda messages, tools: self.render(TemplateInput(messages, tools=tools)))

    @cached_property
    def call_format(self) -> ToolCallFormat | None:
        """The format in which the template writes calls of tools; None if none is known."""
        return tool_calls.found_in(self.tools_source)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format in which the template writes reasoning; None if none is known."""
        return reasoning.found_in(self.source)

    @cached_property
    def special_tokens(self) -> dict[str, Any]:
        """Texts that the template uses by name, such as `bos_token`."""
        return dict(self._wrapper.special_tokens_map)

    def render(self, given: TemplateInput) -> str:
        """Render with transformers."""
        rendered = self._wrapper.apply_chat_template(
            [dict(message) for message in given.messages],
            tools=list(given.tools) or None,
            tokenize=False,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.is_continued,
            **given.values,
        )
        return str(rendered)

    def render_marked(self, given: TemplateInput, marks: Marks) -> Marked:
        """Render messages, values and tools that have marks."""
        template = self._compiled(self.tools_source if given.tools else self.source)
        found = template.render(given.variables(self.special_tokens))
        marked = Marked(str.__str__(found), marks.meaning(found), marks.meaning)
        return cut_continued(marked) if given.is_continued else marked

    def _source(self, tools: Tools | None) -> str:
        try:
            return str(self._wrapper.get_chat_template(tools=tools))
        except ValueError:  # none, or several of which none is the default
            return ""

    @cached_property
    def _compiled(self) -> Callable[[str], Any]:
        return cache(_compile)


def _compile(source: str) -> Any:
    """transformers' template, except that joining pieces keeps their marks (`joined`)."""
    compiled = chat_template_utils._compile_jinja_template(source)  # noqa: SLF001 - it has no public name
    environment = compiled.environment.overlay()
    environment.concat = joined
    template = environment.from_string(source)
    template.root_render_func.__globals__["str_join"] = joined  # of the compiled template alone: its `~`
    return template


def cut_continued(marked: Marked) -> Marked:
    """The text without the end of the turn, and without space that the template has trimmed from the message."""
    end = marked.rindex(_CONTINUED.strip())
    is_trimmed = not marked[end:].startswith(_CONTINUED)
    return marked[:end].rstrip() if is_trimmed else marked[:end]
