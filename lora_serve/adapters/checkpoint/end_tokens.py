"""The tokens that end an adapter's answers beside the base's, as its trainer saved them.

`eos_token` of tokenizer_config.json is a text, `eos_token_id` of generation_config.json a number or a list of numbers.
What the base does not end at is kept in a file of our own, by number.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.checkpoint.added_tokens import BaseTokens
from lora_serve.adapters.checkpoint.chat_template import side_table, tokens_of
from lora_serve.adapters.checkpoint.digest import END_TOKENS_NAME, GENERATION_CONFIG_NAME, TOKENIZER_CONFIG_NAME
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError

MAX_END_TOKENS, MAX_END_WARNINGS = 64, 4


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The ids of the tokens, and a sentence for each one that cannot end anything here."""

    ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def find_end_tokens(
    folder: Path, added: Collection[AddedToken], base: BaseTokens, vocab_size: int, ends: Collection[int]
) -> EndTokens:
    """The tokens of a trainer's folder. `vocab_size`: the adapter's; `ends`: the model's own. Raises OSError."""
    table, where = side_table(folder, GENERATION_CONFIG_NAME), f"of its {GENERATION_CONFIG_NAME}"
    value = table.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    own = [number for number in listed if type(number) is int and 0 <= number < vocab_size][:MAX_END_TOKENS]
    strange = [f"The eos_token_id {str(one)[:100]} {where}" for one in listed if one not in own]
    text = tokens_of(side_table(folder, TOKENIZER_CONFIG_NAME)).get("eos_token")
    if text is not None:
        known = {token.content: token.id for token in added}
        own.append(known.get(text, base.ids.get(text, vocab_size)))
        strange += [f"The eos_token {text[:100]!r} of its {TOKENIZER_CONFIG_NAME}"] if own[-1] >= vocab_size else []
    why = "is no single token of the served vocabulary: it ends no answer."
    warnings = [f"{what} {why}" for what in strange[:MAX_END_WARNINGS]]
    if not table and (folder / GENERATION_CONFIG_NAME).is_file():
        warnings.append(f"Its {GENERATION_CONFIG_NAME} cannot be read: an eos_token_id in it ends no answer.")
    ids = {number for number in own if number < vocab_size} - {*ends, *base.ends}
    return EndTokens(tuple(sorted(ids)), tuple(warnings))


def write_end_tokens(folder: Path, found: EndTokens) -> None:
    """Writes the tokens, in one spelling, as a part of the adapter's content; no file for none. Raises OSError."""
    if found.ids:
        (folder / END_TOKENS_NAME).write_text(json.dumps({"token_ids": list(found.ids)}))


def read_end_tokens(folder: Path) -> EndTokens:
    """The tokens that a registration kept. Raises InvalidAdapterError, OSError."""
    numbers = side_table(folder, END_TOKENS_NAME).get("token_ids", [])
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise InvalidAdapterError([f"{END_TOKENS_NAME} must hold token ids"])
    return EndTokens(tuple(numbers))
