"""Adapters' own chat templates as the tokenizers' views have them: one for each text, rendered beside the loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from lora_serve.adapters.catalog.noted_template import NotedTemplate
from lora_serve.server.background.fair_threads import FairThreads
from lora_serve.text.adapter_template import AdapterChatTemplate, TemplateTexts
from lora_serve.text.rendering.processes import TemplateProcesses
from lora_serve.text.template import ChatTemplate

NUM_PROCESSES = 2
SECONDS_PER_MINUTE = 6.0  # of the threads, for one template, before it comes after all others
MAX_TEMPLATES = 256  # remembered
MAX_WAITING = 4096  # chats of one template


class AdapterTemplates:
    """Used on the event loop. Threads and processes are started when they are needed first."""

    def __init__(self, processes: TemplateProcesses | None = None) -> None:
        self.processes = processes or TemplateProcesses(NUM_PROCESSES)
        self._threads = FairThreads(
            "templates",
            NUM_PROCESSES,
            seconds_per_minute=SECONDS_PER_MINUTE,
            max_waiting=MAX_WAITING,
            calls="templates",
        )
        self._of = functools.lru_cache(MAX_TEMPLATES)(self._made)

    def of(self, base: ChatTemplate, noted: NotedTemplate) -> ChatTemplate:
        """The template of an adapter in place of the base's; equal texts are one template."""
        return self._of(base, TemplateTexts(noted.texts, noted.special_tokens))

    def close(self) -> None:
        """End the processes; what is being rendered ends by itself."""
        self.processes.close()
        self._threads.close(wait=False)

    def _made(self, base: ChatTemplate, content: TemplateTexts) -> ChatTemplate:
        return AdapterChatTemplate(base, content, self.processes, self._thread_for(content))

    def _thread_for(self, content: TemplateTexts) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
        """A thread in the template's turn: one that takes its time keeps the others waiting once at most."""
        turn = str(hash(content))

        def run(work: Callable[[], Any]) -> Awaitable[Any]:
            return asyncio.wrap_future(self._threads.submit(work, turn))

        return run
