"""Adapters' own chat templates as the tokenizers' views have them: one for each text, rendered beside the loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from lora_serve.adapters.catalog.entry import NotedTemplate
from lora_serve.server.background.fair_threads import FairThreads
from lora_serve.text.adapter_template import AdapterChatTemplate, TemplateProcesses, TemplateTexts
from lora_serve.text.template import ChatTemplate

NUM_PROCESSES = 2
SECONDS_PER_MINUTE = 6.0  # of the threads, for one tenant, before it comes after all others
MAX_TEMPLATES = 256  # remembered, of each tenant as its own
MAX_WAITING = 4096  # chats of one tenant


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

    def of(self, base: ChatTemplate, noted: NotedTemplate, tenant: str) -> ChatTemplate:
        """The template of an adapter in place of the base's. `tenant`: in whose turn it is rendered, and on whose time;
        equal texts of two tenants are two templates.
        """
        return self._of(base, TemplateTexts(noted.texts, noted.special_tokens), tenant)

    def close(self) -> None:
        """End the processes; what is being rendered ends by itself."""
        self.processes.close()
        self._threads.close(wait=False)

    def _made(self, base: ChatTemplate, content: TemplateTexts, tenant: str) -> ChatTemplate:
        def run(work: Callable[[], Any]) -> Awaitable[Any]:
            return asyncio.wrap_future(self._threads.submit(work, tenant))

        return AdapterChatTemplate(base, content, self.processes, run)
