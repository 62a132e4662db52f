"""The tokens that end an adapter's answers beside the base's, as its trainer saved them.

`eos_token` of tokenizer_config.json is a text, `eos_token_id` of generation_config.json a number or a list of numbers.
What the base does not end at is kept in a file of our own, by number.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.checkpoint.chat_template import side_table, tokens_of
from lora_serve.adapters.checkpoint.digest import (
    END_TOKENS_NAME,
    GENERATION_CONFIG_NAME,
    MAX_CONFIG_BYTES,
    TOKENIZER_CONFIG_NAME,
)
from lora_serve.adapters.regular_file import open_regular
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.strict_json import parse_object

MAX_END_TOKENS = 64
_NO_NUMBERS = "its eos_token_id is neither a token id nor a list of at most 64"


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The ids of the tokens, and a sentence for each one that cannot end anything here."""

    ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


NO_END_TOKENS = EndTokens()


def find_end_tokens(
    folder: Path, added: Collection[AddedToken], base: BaseTokens, vocab_size: int, ends: Collection[int]
) -> EndTokens:
    """The tokens of a trainer's folder. `vocab_size`: the adapter's; `ends`: the model's own. Raises OSError."""
    numbers, warnings = _numbered(side_table(folder, GENERATION_CONFIG_NAME).get("eos_token_id"), vocab_size)
    text = tokens_of(side_table(folder, TOKENIZER_CONFIG_NAME)).get("eos_token")
    if text is not None:
        known = {token.content: token.id for token in added}
        number = known.get(text, base.ids.get(text, vocab_size))
        if number < vocab_size:
            numbers.append(number)
        else:
            place = f"eos_token of its {TOKENIZER_CONFIG_NAME}, {text[:100]!r}"
            warnings.append(f"The {place}, is no single token of the served vocabulary: it ends no answer.")
    return EndTokens(tuple(sorted({*numbers} - {*ends, *base.ends})), tuple(warnings))


def write_end_tokens(folder: Path, found: EndTokens) -> None:
    """Writes the tokens, in one spelling, as a part of the adapter's content; no file for none. Raises OSError."""
    if found.ids:
        (folder / END_TOKENS_NAME).write_text(json.dumps({"token_ids": list(found.ids)}))


def read_end_tokens(folder: Path) -> EndTokens:
    """The tokens that a registration kept. Raises InvalidAdapterError, OSError."""
    path = folder / END_TOKENS_NAME
    if not path.is_file():
        return NO_END_TOKENS
    with open_regular(path) as file:
        table = parse_object(file.read(MAX_CONFIG_BYTES), END_TOKENS_NAME)
    numbers = table.get("token_ids")
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise InvalidAdapterError([f"{END_TOKENS_NAME} must hold token ids"])
    return EndTokens(tuple(numbers))


def _numbered(value: Any, vocab_size: int) -> tuple[list[int], list[str]]:
    """The token ids, and sentences for those that are none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if len(listed) > MAX_END_TOKENS or any(type(number) is not int or number < 0 for number in listed):
        return [], [f"{GENERATION_CONFIG_NAME}: {_NO_NUMBERS}: it ends no answer."]
    beyond = [number for number in listed if number >= vocab_size]
    reason = "of its generation_config.json is beyond the served vocabulary: it ends no answer."
    return [n for n in listed if n < vocab_size], [f"The eos_token_id {number} {reason}" for number in beyond]
