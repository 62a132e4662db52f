"""Compiles a grammar as the engine will, but over a vocabulary of single bytes, to see whether it can be used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lora_serve.core.setting_groups.grammars import GrammarConfig

NUM_BYTES = 256
NUM_STEPS = 5  # into a grammar, which are tried
MAX_SECONDS = 2.0  # of the processor, for all of it
MAX_STEP_SECONDS = 0.1  # of the processor, for one: other rows wait for it
TOO_COSTLY = "too costly: make it shorter, or less ambiguous"
MAX_ROW_ITEMS = 10_000  # four for each property that may come next: an object may have 2000
UNSATISFIABLE = "no text satisfies it"


def parser_limits(config: GrammarConfig) -> LLParserLimits:
    """The limits in the terms of `llguidance`. Its messages say nothing of the parser's state."""
    return LLParserLimits(
        initial_lexer_fuel=config.max_lexer_work,
        step_max_items=config.max_grammar_items,
        max_items_in_row=min(MAX_ROW_ITEMS, config.max_grammar_items),
        max_lexer_states=config.max_lexer_states,
        max_grammar_size=config.max_grammar_symbols,
        verbose_errors=False,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens as `TokenizerWrapper` wants them: the special ones at their own ids, and one for each byte."""

    tokens: list[bytes]
    special_token_ids: list[int]
    byte_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [self.byte_ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class GrammarCompiler:
    """Compiles grammars for one vocabulary, within limits; immutable, used by several threads."""

    def __init__(self, special_tokens: Mapping[int, str], vocab_size: int, config: GrammarConfig) -> None:
        """`special_tokens`: by id, those that a grammar may name as `<name>`."""
        self.special_ids = {content: number for number, content in special_tokens.items()}
        self._limits = parser_limits(config)
        vocabulary = _vocabulary(special_tokens, vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), slices=[])
        # What a text begins with most often, then the rest: a few steps into a grammar show what is too large in it.
        self._tried = [*(vocabulary.byte_ids[byte] for byte in b'{"['), *vocabulary.byte_ids[33:]]

    def fault(self, text: str) -> str:
        """The reason why a grammar cannot be used, in the words of `llguidance`; empty if it can.

        It runs without the GIL for most of its time.
        """
        began = time.thread_time()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        slowest, is_first = 0.0, True
        for _ in range(NUM_STEPS):
            if matcher.is_stopped():
                break
            step_began = time.thread_time()
            allowed = matcher.compute_bitmask()
            slowest = max(slowest, time.thread_time() - step_began)
            number = next((i for i in self._tried if allowed[i // 8] >> (i % 8) & 1), None)
            if matcher.is_stopped() or number is None or not matcher.consume_token(number):
                break
            is_first = False
        if matcher.is_error() or (is_first and matcher.is_stopped() and not matcher.is_accepting()):
            error: str = matcher.get_error()
            return UNSATISFIABLE if not error or error.startswith("NoExtension") else error
        if slowest > MAX_STEP_SECONDS or time.thread_time() - began > MAX_SECONDS:
            return TOO_COSTLY
        return ""


def _vocabulary(special_tokens: Mapping[int, str], vocab_size: int) -> _Vocabulary:
    tokens = [b""] * max(vocab_size, max(special_tokens, default=0) + 1, NUM_BYTES + len(special_tokens))
    for number, content in special_tokens.items():
        tokens[number] = content.encode()
    free = (number for number in range(len(tokens)) if number not in special_tokens)
    byte_ids = [next(free) for _ in range(NUM_BYTES)]
    for byte, number in enumerate(byte_ids):
        tokens[number] = bytes((byte,))
    tokens.append(b"<end of text>")
    return _Vocabulary(tokens, [*special_tokens, len(tokens) - 1], byte_ids, len(tokens) - 1)
