"""Structured output: the size of schemas and grammars, and the work that they may cause."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.setting_types import Bytes, setting


@dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """Limits of one request's schema, regex or grammar, and of the checked ones that are remembered."""

    max_grammar_size: Bytes = setting(
        2**17, "bytes of a request's JSON schema, choices or structural tag at most", ge=256, le=2**24
    )
    max_regex_size: Bytes = setting(
        2**14, "bytes of a request's regex at most, and half those of its Lark or GBNF grammar", ge=256, le=2**20
    )
    max_grammar_symbols: int = setting(
        500_000, "symbols of a request's grammar, once compiled, at most", ge=1000, le=10**8
    )
    max_grammar_items: int = setting(
        50_000, "states that the parser of a grammar may be in at one token at most", ge=1000, le=10**7
    )
    max_lexer_states: int = setting(
        100_000, "states of a grammar's regexes at most; each takes some 430 bytes", ge=1000, le=10**7
    )
    max_lexer_work: int = setting(
        1_000_000, "steps for compiling a grammar's regexes at most; 50 million a second", ge=1000, le=10**9
    )
    grammar_threads: int = setting(2, "threads that check schemas and grammars", ge=1, le=64)
    grammar_cache: Bytes = setting(2**25, "bytes of checked schemas and grammars that are remembered")
