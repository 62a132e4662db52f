"""Texts that a grammar allows, drawn byte by byte, and whether it allows a given one: without any model."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars.checking import parser_limits

END = 256
CLOSING = frozenset(b'"}],:')  # drawn more often, so that texts end


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def allows(grammar: str, text: str) -> bool:
    """True if the whole of `text` is what the grammar asks for."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=parser_limits(GrammarConfig()))
    assert not matcher.is_error(), matcher.get_error()
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


def drawn(grammar: str, seed: int, most: int = 300) -> str | None:
    """A text that the grammar allows; None if it has not ended after `most` bytes."""
    matcher, source, text = LLMatcher(TOKENIZER, grammar, log_level=0), random.Random(seed), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    while len(text) < most:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [number for number in range(END + 1) if mask[number // 8] >> (number % 8) & 1]
        weights = [
            40 if number == END else 10 if number in CLOSING else 3 if number > 32 else 0.2 for number in allowed
        ]
        (number,) = source.choices(allowed, weights)
        if number == END:
            return text.decode()
        text.append(number)
        assert matcher.consume_token(number)
    return None
