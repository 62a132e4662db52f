"""Grammars over the served vocabulary: compiled, and asked for the tokens that may come, on threads of their own.

`llguidance` does both without the GIL. Masks have one thread of Python, which hands the sequences of a step to threads
of the library's own all at once; grammars have others, so that no mask waits for a grammar.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher

from lora_serve.core.adapter import AddedToken
from lora_serve.core.batch import AllowedTokens
from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.errors import CapacityError, InternalError, InvalidRequestError, LoraServeError, NotReadyError
from lora_serve.core.request import TokenGrammar
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.core.stats import ConstraintStats
from lora_serve.text.grammars.checking import parser_limits
from lora_serve.text.grammars.vocabulary import Vocabularies

MAX_COMPILED = 64  # grammars that are remembered
MAX_USES = 256  # requests that copy one compilation: what these learn of its regexes stays with it, and takes memory
MASK_SECONDS = 0.1  # of the processor for one mask; whatever takes longer would hold up all rows of its step
_MAX_MASK_THREADS = 8
_TOO_SLOW = "it takes too long to find the tokens that may come next"
_log = logging.getLogger(__name__)
T = TypeVar("T")

Key = tuple[str, str, tuple[AddedToken, ...]]  # tenant, digest of the text, tokens beyond the base's


@dataclass(slots=True)
class _Figures:
    """Counted by several threads, each value by one of them at a time."""

    num_compiled: int = 0
    compile_seconds: float = 0.0
    num_masks: int = 0
    mask_seconds: float = 0.0
    wait_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class GrammarConstraint:
    """See `core.constraints.TokenConstraint`."""

    def __init__(self, matcher: LLMatcher, num_words: int, figures: _Figures) -> None:
        """`num_words`: of 32 tokens each."""
        self.matcher = matcher
        self.num_words = num_words
        self.begun: tuple[Future[list[bytes]], int] | None = None  # the masks of a step, and this one's place
        self.is_suspect = False  # it was among masks that took too long together
        self.is_slow = False
        self._figures = figures

    def wait(self) -> bytes:
        """See `AllowedTokens.wait`."""
        assert self.begun is not None, "a step begins the masks of all rows that it samples for"
        masks, place = self.begun
        start = time.perf_counter()
        found = masks.result()[place]
        self._figures.wait_seconds += time.perf_counter() - start
        self._check()
        return found

    @property
    def is_over(self) -> bool:
        """See `TokenConstraint.is_over`."""
        return self.matcher.is_stopped()

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `TokenConstraint.advance`."""
        self.begun = None
        self.matcher.consume_tokens(list(token_ids))
        self._check()

    def forced(self) -> tuple[int, ...]:
        """See `TokenConstraint.forced`."""
        return tuple(self.matcher.compute_ff_tokens())

    def after(self, draft: Sequence[int]) -> tuple[GrammarConstraint, ...]:
        """See `TokenConstraint.after`. Each has a matcher of its own: nothing comes of a guess that fails."""
        found: list[GrammarConstraint] = []
        last = self.matcher
        for token in () if self.is_suspect else draft:
            last = last.deep_copy()
            if not last.consume_token(token) or last.is_stopped() or last.compute_ff_tokens():
                break
            found.append(GrammarConstraint(last, self.num_words, self._figures))
        return tuple(found)

    def _check(self) -> None:
        if self.is_slow or self.matcher.is_error():
            reason = _TOO_SLOW if self.is_slow else _first_line(self.matcher.get_error())
            raise InvalidRequestError(f"The answer cannot be held to the grammar any further: {reason}")


@dataclass(slots=True)
class _Compiled:
    """A grammar at its beginning, which every request copies."""

    matcher: LLMatcher
    vocab_size: int
    num_uses: int = 0

    def constraint(self, figures: _Figures) -> GrammarConstraint:
        """A new request's."""
        self.num_uses += 1
        return GrammarConstraint(self.matcher.deep_copy(), -(-self.vocab_size // 32), figures)


class GrammarConstraints:
    """See `core.constraints.Constraints`. Shared by all engines that one process has, one after another."""

    def __init__(
        self,
        vocabularies: Vocabularies,
        config: GrammarConfig,
        post: Callable[[GrammarCompiled], None],
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_thread`: called first on each thread."""
        self._vocabularies = vocabularies
        self._post = post
        self._limits = parser_limits(config)
        self._compiling = ThreadPoolExecutor(config.grammar_threads, "grammar", initializer=on_thread)
        self._masking = ThreadPoolExecutor(1, "masks", initializer=on_thread)
        self._executor = LLExecutor(num_threads=min(_MAX_MASK_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        self._compiled: OrderedDict[Key, Future[_Compiled]] = OrderedDict()  # the engine's thread alone uses it
        self._figures = _Figures()

    def prepare(self) -> None:
        """Begins to build the base's vocabulary, so that the first request need not wait for it."""
        self._compiling.submit(self._prepare)

    def close(self) -> None:
        """Waits for what is under way; the rest is dropped."""
        self._compiling.shutdown(cancel_futures=True)
        self._masking.shutdown(cancel_futures=True)

    def compile(self, request_id: str, tenant: str, grammar: TokenGrammar) -> None:
        """See `Constraints.compile`."""
        key = (tenant, hashlib.sha256(grammar.text.encode()).hexdigest(), grammar.added_tokens)
        future = self._compiled.get(key)
        if future is None or self._is_spent(future):
            future = self._compiled[key] = _submit(self._compiling, lambda: self._compile(grammar))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        future.add_done_callback(lambda done: self._post(self._ended(request_id, done)))

    def _is_spent(self, future: Future[_Compiled]) -> bool:
        if not future.done():
            return False
        return future.cancelled() or future.exception() is not None or future.result().num_uses >= MAX_USES

    def start(self, waited_for: Sequence[AllowedTokens]) -> None:
        """See `Constraints.start`."""
        new = [one for one in waited_for if isinstance(one, GrammarConstraint) and one.begun is None]
        if new:
            future = _submit(self._masking, lambda: self._masks(new))
            for place, one in enumerate(new):
                one.begun = future, place

    def stats(self) -> ConstraintStats:
        """See `Constraints.stats`."""
        figures = self._figures
        return ConstraintStats(
            figures.num_compiled,
            figures.compile_seconds,
            figures.num_masks,
            figures.mask_seconds,
            figures.wait_seconds,
        )

    def _prepare(self) -> None:
        try:
            self._vocabularies.get(())
        except Exception:
            _log.exception("the tokenizer cannot be used for structured output")

    def _compile(self, grammar: TokenGrammar) -> _Compiled:
        """On a thread of its own. The first mask is worked out too, as it takes the longest by far."""
        tokenizer = self._vocabularies.get(grammar.added_tokens)
        start = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=self._limits)
        mask_seconds = 0.0 if matcher.is_error() else _timed_mask(matcher)
        with self._figures.lock:
            self._figures.num_compiled += 1
            self._figures.compile_seconds += time.perf_counter() - start
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar cannot be used: {_first_line(matcher.get_error())}")
        if mask_seconds > MASK_SECONDS:
            raise InvalidRequestError(f"The grammar cannot be used: {_TOO_SLOW}")
        return _Compiled(matcher, tokenizer.vocab_size)

    def _ended(self, request_id: str, done: Future[_Compiled]) -> GrammarCompiled:
        if done.cancelled():
            return GrammarCompiled(request_id, None, NotReadyError("The server is shutting down."))
        error = done.exception()
        if error is None:
            return GrammarCompiled(request_id, done.result().constraint(self._figures))
        if not isinstance(error, LoraServeError):
            _log.error("a grammar could not be compiled", exc_info=error)
            error = InternalError("The grammar could not be compiled.")
        return GrammarCompiled(request_id, None, error)

    def _masks(self, constraints: Sequence[GrammarConstraint]) -> list[bytes]:
        """In their order. A matcher that fails is in an error state afterwards."""
        start = time.perf_counter()
        for one in constraints:
            if one.is_suspect:
                one.is_slow, one.is_suspect = _timed_mask(one.matcher) > MASK_SECONDS, False
        found = {place: b"" for place, one in enumerate(constraints) if one.is_slow}
        quick = [(place, one.num_words) for place, one in enumerate(constraints) if not one.is_slow]
        for num_words in {words for _, words in quick}:
            places = [place for place, words in quick if words == num_words]
            masks = np.zeros((len(places), num_words), dtype=np.int32)
            targets = [(constraints[place].matcher, row) for row, place in enumerate(places)]
            self._executor.unsafe_compute_mask_ptr(targets, masks.ctypes.data, 4 * num_words, len(places))
            found.update((place, masks[row].tobytes()) for row, place in enumerate(places))
        seconds = time.perf_counter() - start
        if seconds > MASK_SECONDS:
            for one in constraints:
                one.is_suspect = True
        self._figures.num_masks += len(constraints)
        self._figures.mask_seconds += seconds
        return [found[place] for place in range(len(constraints))]


def _submit(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Has a thread of the pool run `call`. The future ends with CapacityError if the system gives no thread for it; if
    the pool runs it later all the same, that does no harm.
    """
    try:
        return pool.submit(call)
    except RuntimeError as error:
        _log.warning("no thread for a grammar: %r", error)
    refused = Future[T]()
    refused.set_exception(CapacityError("There is no thread for structured output at present; try again."))
    return refused


def _timed_mask(matcher: LLMatcher) -> float:
    """The seconds of the processor that the next mask takes."""
    start = time.thread_time()
    matcher.compute_bitmask()
    return time.thread_time() - start


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["it is invalid"])[0]
