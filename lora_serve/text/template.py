"""The base model's chat template, rendered by transformers in jinja2's immutable sandbox, and again with marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from lora_serve.text.marked import Marked, Marks, joined

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own: it cuts the text where this stands, as `_cut` does

Conversation = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders messages. Raises whatever the template raises."""

    def __init__(self, wrapper: PreTrainedTokenizerFast) -> None:
        self._wrapper: Any = wrapper

    @cached_property
    def source(self) -> str:
        """The template of a chat without tools; empty if the model has none."""
        try:
            return str(self._wrapper.get_chat_template())
        except ValueError:  # none, or several of which none is the default
            return ""

    @cached_property
    def special_tokens(self) -> dict[str, Any]:
        """Texts that the template uses by name, such as `bos_token`."""
        return dict(self._wrapper.special_tokens_map)

    def render(
        self, conversation: Conversation, values: Mapping[str, Any], *, add_generation_prompt: bool, is_continued: bool
    ) -> str:
        """Render with transformers."""
        rendered = self._wrapper.apply_chat_template(
            [dict(message) for message in conversation],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=is_continued,
            **values,
        )
        return str(rendered)

    def render_marked(
        self,
        conversation: Conversation,
        values: Mapping[str, Any],
        marks: Marks,
        *,
        add_generation_prompt: bool,
        is_continued: bool,
    ) -> Marked:
        """Render messages and values that have marks."""
        messages = [dict(message) for message in conversation]
        if is_continued:
            messages[-1]["content"] = messages[-1]["content"] + _CONTINUED
        found = self._compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(self.special_tokens | dict(values)),
        )
        marked = Marked(str.__str__(found), marks.meaning(found), marks.meaning)
        return _cut(marked) if is_continued else marked

    @cached_property
    def _compiled(self) -> Any:
        """transformers' template, except that joining pieces keeps their marks (`joined`)."""
        compiled = chat_template_utils._compile_jinja_template(self.source)  # noqa: SLF001 - it has no public name
        environment = compiled.environment.overlay()
        environment.concat = joined
        template = environment.from_string(self.source)
        template.root_render_func.__globals__["str_join"] = joined  # of the compiled template alone: its `~`
        return template


def _cut(marked: Marked) -> Marked:
    """The text without the end of the turn, and without space that the template has trimmed from the message."""
    end = marked.rindex(_CONTINUED.strip())
    is_trimmed = not marked[end:].startswith(_CONTINUED)
    return marked[:end].rstrip() if is_trimmed else marked[:end]
