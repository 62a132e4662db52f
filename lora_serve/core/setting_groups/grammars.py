"""Structured output: the size of schemas and grammars, and the work that they may cause."""

from __future__ import annotations

from pydantic import Field

from lora_serve.core.setting_types import Bytes, SettingsGroup


class GrammarSettings(SettingsGroup):
    """Limits of one request's schema, regex or grammar, and of the checked ones that are remembered."""

    max_grammar_size: Bytes = Field(
        2**17, ge=256, le=2**24, description="bytes of a request's JSON schema, choices or structural tag at most"
    )
    max_regex_size: Bytes = Field(
        2**14,
        ge=256,
        le=2**20,
        description="bytes of a request's regex at most, and half those of its Lark or GBNF grammar",
    )
    max_grammar_symbols: int = Field(
        500_000, ge=1000, le=10**8, description="symbols of a request's grammar, once compiled, at most"
    )
    max_grammar_items: int = Field(
        50_000, ge=1000, le=10**7, description="states that the parser of a grammar may be in at one token at most"
    )
    max_lexer_states: int = Field(
        100_000, ge=1000, le=10**7, description="states of a grammar's regexes at most; each takes some 430 bytes"
    )
    max_lexer_work: int = Field(
        1_000_000, ge=1000, le=10**9, description="steps for compiling a grammar's regexes at most; 50 million a second"
    )
    grammar_threads: int = Field(2, ge=1, le=64, description="threads that check schemas and grammars")
    grammar_cache: Bytes = Field(2**25, description="bytes of checked schemas and grammars that are remembered")
