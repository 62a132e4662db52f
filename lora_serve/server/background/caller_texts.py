"""Work on texts that callers have chosen, on threads that tenants share fairly: schemas and grammars are checked,
adapters' own chat templates rendered.

A tenant's texts are found again by itself alone, so no other can measure that the same was sent before.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from lora_serve.adapters.catalog.entry import NotedTemplate
from lora_serve.core.adapter import AddedToken
from lora_serve.core.request import TokenGrammar
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.server.background.tasks import FairThreads
from lora_serve.text.adapter_template import AdapterChatTemplate, TemplateProcesses, TemplateTexts
from lora_serve.text.grammars import Constraint
from lora_serve.text.grammars.checking import (
    GrammarCompiler,
    check_size,
    checked_own_text,
    checked_text,
    content,
    measured,
)
from lora_serve.text.template import ChatTemplate
from lora_serve.text.tokenizer import TextModel

GRAMMAR_SECONDS_PER_MINUTE = 20.0  # of a thread; a tenant that took more comes after all others
MAX_WAITING_GRAMMARS = 1024  # of one tenant; most take a millisecond
MAX_COMPILERS = 8  # of vocabularies that adapters have extended
ENTRY_BYTES = 1024  # of a remembered grammar, besides its text
TEXT_FACTOR = 8  # a grammar made for a caller may be so many times larger than one it sends
MANY = 65_536  # characters of a text that is hashed on the event loop
FEW = 4096  # characters, about, that are looked at on the event loop
Key = tuple[bytes, tuple[AddedToken, ...]]
NUM_PROCESSES = 2
TEMPLATE_SECONDS_PER_MINUTE = 6.0  # of the threads, for one tenant, before it comes after all others
MAX_TEMPLATES = 256  # remembered, of each tenant as its own
MAX_WAITING_CHATS = 4096  # chats of one tenant


class GrammarChecks:
    """The threads and the memory."""

    def __init__(self, text: TextModel, config: GrammarConfig) -> None:
        self._text = text
        self._config = config
        self._threads = FairThreads(
            "grammar",
            config.grammar_threads,
            seconds_per_minute=GRAMMAR_SECONDS_PER_MINUTE,
            max_waiting=MAX_WAITING_GRAMMARS,
            calls="grammars",
        )
        self._known = KnownGrammars(config.grammar_cache)
        self._compiler = functools.lru_cache(MAX_COMPILERS)(self._new_compiler)

    async def of(self, tenant: str, constraint: Constraint, added_tokens: tuple[AddedToken, ...] = ()) -> TokenGrammar:
        """The grammar of a constraint, for the base's vocabulary and `added_tokens`.

        Raises InvalidRequestError, RateLimitedError, NotReadyError.
        """
        if measured(constraint.source, FEW) <= FEW:
            digest = self._digest(constraint)
        else:
            digest = await asyncio.to_thread(self._digest, constraint)
        return await self._checked(
            tenant, digest, added_tokens, lambda compiler: checked_text(constraint, compiler, self._config)
        )

    async def of_text(
        self, tenant: str, text: str, param: str, added_tokens: tuple[AddedToken, ...] = ()
    ) -> TokenGrammar:
        """The same for a grammar in the form of `llguidance`, made from the field `param`."""
        check_size(len(text), param, TEXT_FACTOR * self._config.max_grammar_size)
        digest = _digest(text) if len(text) <= MANY else await asyncio.to_thread(_digest, text)
        return await self._checked(
            tenant, digest, added_tokens, lambda compiler: checked_own_text(text, param, compiler, self._config)
        )

    def close(self) -> None:
        """Refuse the calls that wait, and return when those that run have ended."""
        self._threads.close()

    def _digest(self, constraint: Constraint) -> bytes:
        most = self._config.max_grammar_size
        check_size(measured(constraint.source, most), constraint.param, most)
        return hashlib.sha256(content(constraint)).digest()

    async def _checked(
        self,
        tenant: str,
        digest: bytes,
        added_tokens: tuple[AddedToken, ...],
        check: Callable[[GrammarCompiler], str],
    ) -> TokenGrammar:
        key = (digest, added_tokens)
        if (known := self._known.find(tenant, key)) is not None:
            return known

        def call() -> TokenGrammar:
            if (known := self._known.find(tenant, key)) is not None:
                return known  # another request of the tenant was first
            grammar = TokenGrammar(check(self._compiler(added_tokens)), added_tokens)
            self._known.add(tenant, key, grammar)
            return grammar

        return await self._threads.run(call, tenant)

    def _new_compiler(self, added_tokens: tuple[AddedToken, ...]) -> GrammarCompiler:
        text = self._text.with_added(added_tokens)
        special = {number: text.token_text(number) for number in sorted(text.special_ids)}
        return GrammarCompiler(special, text.vocab_size, self._config)


class KnownGrammars:
    """Grammars that were right, by tenant, within a number of bytes: the tenant with the most of them loses its oldest
    first. Every method may be called from any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._grammars: dict[str, OrderedDict[Key, TokenGrammar]] = {}
        self._num_bytes: dict[str, int] = {}  # by tenant

    def find(self, tenant: str, key: Key) -> TokenGrammar | None:
        with self._lock:
            own = self._grammars.get(tenant)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            return own[key]

    def add(self, tenant: str, key: Key, grammar: TokenGrammar) -> None:
        """Remember a grammar that is not known yet."""
        with self._lock:
            own = self._grammars.setdefault(tenant, OrderedDict())
            if key not in own:
                own[key] = grammar
                self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + _size(grammar)
            while sum(self._num_bytes.values()) > self._max_bytes:
                self._drop_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        _, grammar = self._grammars[tenant].popitem(last=False)
        self._num_bytes[tenant] -= _size(grammar)
        if not self._grammars[tenant]:
            del self._grammars[tenant], self._num_bytes[tenant]


def _digest(text: str) -> bytes:
    return hashlib.sha256(b"text" + text.encode()).digest()


def _size(grammar: TokenGrammar) -> int:
    return ENTRY_BYTES + 4 * len(grammar.text)  # what a text takes at most


class AdapterTemplates:
    """Used on the event loop. Threads and processes are started when they are needed first."""

    def __init__(self, processes: TemplateProcesses | None = None) -> None:
        self.processes = processes or TemplateProcesses(NUM_PROCESSES)
        self._threads = FairThreads(
            "templates",
            NUM_PROCESSES,
            seconds_per_minute=TEMPLATE_SECONDS_PER_MINUTE,
            max_waiting=MAX_WAITING_CHATS,
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
