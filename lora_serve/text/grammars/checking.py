"""A constraint -> a grammar that was compiled once, or an error with the place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars.constraint import (
    Constraint,
    ConstraintKind,
    grammar_fault,
    refused,
    regex_fault,
    schema_fault,
)
from lora_serve.text.grammars.schema import subschemas
from lora_serve.text.grammars.translation import grammar_text, json_schema_of, safe_text, schema_grammar

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


MAX_SEARCH_SECONDS = 0.3  # for the search; the place found by then is shown
_DEFINITIONS = ("$defs", "definitions")


def checked_text(constraint: Constraint, compiler: GrammarCompiler, config: GrammarConfig) -> str:
    """The text of the grammar. Raises InvalidRequestError."""
    text = grammar_text(constraint, config, compiler.special_ids)
    error = compiler.fault(text)
    if not error:
        return text
    if constraint.kind is ConstraintKind.JSON:

        def fault(part: Mapping[str, Any]) -> str:
            try:  # by itself its references mean something else, and may cost too much
                alone = json_schema_of(replace(constraint, source=part), config)
            except InvalidRequestError:
                return ""
            return compiler.fault(schema_grammar(alone, constraint.style))

        place = faulty_place(json_schema_of(constraint, config), error, fault)
        raise refused(constraint.param, schema_fault(error), place)
    describe = regex_fault if constraint.kind is ConstraintKind.REGEX else grammar_fault
    raise refused(constraint.param, describe(error))


def checked_own_text(text: str, param: str, compiler: GrammarCompiler, config: GrammarConfig) -> str:
    """A grammar in the form of `llguidance` that the server made around schemas of a caller, see `safe_text`.

    Raises InvalidRequestError.
    """
    safe = safe_text(text, param, config)
    if error := compiler.fault(safe):
        raise refused(param, grammar_fault(error))
    return safe


def faulty_place(schema: Mapping[str, Any], error: str, fault: Callable[[Mapping[str, Any]], str]) -> str:
    """JSON pointer of the innermost schema that has the same error by itself: `llguidance` says what is wrong, not
    where. `fault`: the error of a schema.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, inner, until = "#", schema, time.monotonic() + MAX_SEARCH_SECONDS
    while True:
        for pointer, child in subschemas(inner):
            if time.monotonic() > until:
                return place
            if isinstance(child, dict) and fault({**definitions, **child}) == error:
                place, inner = place + pointer, child
                break
        else:
            return place
