"""The chat template of an adapter in place of the base's. Nobody trusts who wrote it, so a process renders it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.marked import Marked, Marks
from lora_serve.text.rendering.processes import TemplateFaultError, TemplateLimitError, TemplateProcesses
from lora_serve.text.template import ChatTemplate, Conversation, Tools, cut_continued, with_continued

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates, as transformers has them


@dataclass(frozen=True, slots=True)
class TemplateTexts:
    """The content of a template: texts by name and special tokens by name, sorted."""

    texts: tuple[tuple[str, str], ...]
    special_tokens: tuple[tuple[str, str], ...] = ()


class AdapterChatTemplate(ChatTemplate):
    """See ChatTemplate. Its methods wait for a process, so no event loop may call them: `thread` runs what does."""

    owner = "adapter"

    def __init__(
        self,
        base: ChatTemplate,
        content: TemplateTexts,
        processes: TemplateProcesses,
        thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """`base`: of the model, whose special tokens count where the adapter has none of its own."""
        self._texts = dict(content.texts)
        self._special_tokens = base.special_tokens | dict(content.special_tokens)
        self._processes = processes
        self.thread = thread

    @property
    def source(self) -> str:
        return self._texts.get(DEFAULT, "")

    @property
    def tools_source(self) -> str:
        return self._texts.get(WITH_TOOLS) or self.source

    @property
    def texts(self) -> dict[str, str]:
        return self._texts

    @property
    def special_tokens(self) -> dict[str, Any]:
        return self._special_tokens

    def render(
        self,
        conversation: Conversation,
        values: Mapping[str, Any],
        tools: Tools = (),
        *,
        add_generation_prompt: bool,
        is_continued: bool,
    ) -> str:
        ends: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "is_continued": is_continued}
        return str.__str__(self.render_marked(conversation, values, tools, None, **ends))

    def render_marked(
        self,
        conversation: Conversation,
        values: Mapping[str, Any],
        tools: Tools,
        marks: Marks | None,
        *,
        add_generation_prompt: bool,
        is_continued: bool,
    ) -> Marked:
        names: dict[str, Any] = {
            "messages": with_continued(conversation) if is_continued else list(conversation),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.tools_source if tools else self.source
        try:
            found = self._processes.render(source, names | self._special_tokens | dict(values), marks)
        except TemplateFaultError as error:
            raise jinja2.TemplateError(str(error)) from None
        except TemplateLimitError as error:
            message = f"The adapter's own chat template cannot be rendered for these messages: {error}."
            raise InvalidRequestError(message, param="messages") from None
        return cut_continued(found) if is_continued else found
