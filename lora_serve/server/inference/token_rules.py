"""Rules about tokens that a request gives as text, as rules about token ids."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.tokenizer import TextModel


def biases_of(text: TextModel, biases: Sequence[tuple[int | str, float]]) -> tuple[tuple[int, float], ...]:
    """`logit_bias` by token id. Raises InvalidRequestError for a text that is not exactly one token."""
    return tuple((_token_of(text, key) if isinstance(key, str) else key, bias) for key, bias in biases)


def bad_word_ids(text: TextModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as the tokens they may be written in: at the beginning of a text and, if that makes another first
    token and as many of them, behind a space. That is vLLM's rule.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (text.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " "))
        if not plain:
            raise InvalidRequestError(f"`bad_words`: {word[:32]!r} gives no tokens.", param="bad_words")
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    return tuple(found)


def _token_of(text: TextModel, key: str) -> int:
    token_ids = text.encode(key, add_special_tokens=False)
    if len(token_ids) != 1 or text.decode(token_ids, skip_special_tokens=False).strip() != key.strip():
        raise InvalidRequestError(
            f"`logit_bias`: {key[:32]!r} is not exactly one token of this model; give token ids (POST /tokenize).",
            param="logit_bias",
        )
    return token_ids[0]
