"""The tokens that an adapter's own tokenizer.json adds to the base's, and those that end its answers.

Nothing else of tokenizer.json is taken: its vocabulary, normalizer, pre-tokenizer and templates stay the base's. Both
are kept in small files of our own, named unlike the `added_tokens.json` that slow tokenizers save in another form.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lora_serve.adapters.checkpoint.bound import BoundAdapter
from lora_serve.adapters.checkpoint.chat_template import side_table, tokens_of
from lora_serve.adapters.checkpoint.content import (
    ADDED_TOKENS_NAME,
    END_TOKENS_NAME,
    GENERATION_CONFIG_NAME,
    MAX_ADDED_TOKENS_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from lora_serve.adapters.regular_file import open_regular, pieces_of, size_of
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.strict_json import parse_object

MAX_ADDED_TOKENS = 4096
MAX_CONTENT = 256  # characters
MAX_END_TOKENS, MAX_END_WARNINGS = 64, 4
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class BaseTokens:
    """The base tokenizer's whole vocabulary, added tokens included."""

    ids: Mapping[str, int]
    ends: tuple[int, ...] = ()  # its own end-of-text token, which ends every answer


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The ids of the tokens, and a sentence for each one that cannot end anything here."""

    ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


class _TokenizerFile(msgspec.Struct):
    """A tokenizer.json; what else is in it is skipped unread, megabytes of vocabulary among it."""

    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")


def find_added_tokens(folder: Path, bound: BoundAdapter, spec: ModelSpec, base: BaseTokens) -> tuple[AddedToken, ...]:
    """The tokens that the tokenizer.json of a trainer's folder adds; none if the adapter trained no tokens of its own.

    Raises InvalidAdapterError, OSError.
    """
    path = folder / TOKENIZER_NAME
    if not _may_add(bound, spec, base) or not path.is_file():
        return ()
    table = parse_object(b'{"added_tokens": ' + added_tokens_text(path) + b"}", f"{TOKENIZER_NAME}: added_tokens")
    tokens = _parse(table["added_tokens"], TOKENIZER_NAME)
    new = tuple(sorted(_new(tokens, base), key=lambda token: token.id))
    _check_ids(new, len(base.ids), bound.vocab_size or spec.vocab_size)
    return new


def write_added_tokens(folder: Path, tokens: tuple[AddedToken, ...]) -> None:
    """Writes the tokens, in one spelling, as a part of the adapter's content; no file for no tokens. Raises OSError."""
    if tokens:
        entries = [{"id": token.id, "content": token.content, "special": token.is_special} for token in tokens]
        flags = [{flag: getattr(token, flag) for flag in _FLAGS} for token in tokens]
        table = {"added_tokens": [entry | flag for entry, flag in zip(entries, flags, strict=True)]}
        (folder / ADDED_TOKENS_NAME).write_text(json.dumps(table, sort_keys=True), "utf-8")


def read_added_tokens(folder: Path) -> tuple[AddedToken, ...]:
    """The tokens that `write_added_tokens` kept. Raises InvalidAdapterError, OSError."""
    path = folder / ADDED_TOKENS_NAME
    if not path.is_file():
        return ()
    with open_regular(path) as file:
        return parse_added_tokens(file.read(MAX_ADDED_TOKENS_BYTES))


def parse_added_tokens(text: bytes) -> tuple[AddedToken, ...]:
    """The same from the file's bytes. Raises InvalidAdapterError."""
    table = parse_object(text, ADDED_TOKENS_NAME)
    return tuple(_parse(table.get("added_tokens"), ADDED_TOKENS_NAME))


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


def added_tokens_text(path: Path) -> bytes:
    """The JSON text of a tokenizer.json's `added_tokens`; an empty list if it has none.

    Raises InvalidAdapterError, OSError.
    """
    with open_regular(path) as file:
        if not 0 < size_of(file) <= MAX_TOKENIZER_BYTES:
            raise _broken(f"it is empty, no file of its own, or larger than {MAX_TOKENIZER_BYTES} bytes")
        text = b"".join(pieces_of(file))
    try:
        found = msgspec.json.decode(text, type=_TokenizerFile).added_tokens
    except RecursionError:
        raise _broken("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _broken(f"it is not a JSON object, or not valid JSON: {error}") from None
    if len(memoryview(found)) > MAX_ADDED_TOKENS_BYTES:
        raise _broken(f"its added_tokens take more than {MAX_ADDED_TOKENS_BYTES} bytes")
    return bytes(found)


def _broken(reason: str) -> InvalidAdapterError:
    return InvalidAdapterError([f"{TOKENIZER_NAME}: {reason}"])


def _may_add(bound: BoundAdapter, spec: ModelSpec, base: BaseTokens) -> bool:
    """True if the adapter brings rows of the input embedding that the base's tokenizer has no tokens for."""
    trained = max((token for tokens in bound.tokens.values() for token in tokens.token_ids), default=0)
    return bool(bound.vocab_size) or trained >= len(base.ids) or spec.input_embedding in bound.parameters


def _parse(entries: Any, name: str) -> list[AddedToken]:
    if not isinstance(entries, list):
        raise InvalidAdapterError([f"{name}: added_tokens is no list"])
    tokens = [_token(entry, f"{name}: added_tokens[{index}]") for index, entry in enumerate(entries)]
    if len({token.id for token in tokens}) < len(tokens) or len({token.content for token in tokens}) < len(tokens):
        raise InvalidAdapterError([f"{name}: an id or a content of added_tokens occurs twice"])
    return tokens


def _token(entry: Any, where: str) -> AddedToken:
    fields = entry if isinstance(entry, dict) else {}
    number, content = fields.get("id"), fields.get("content")
    flags = {flag: fields.get(flag, False) for flag in _FLAGS}
    is_special = fields.get("special", False)
    if type(number) is not int or number < 0 or not isinstance(content, str):
        raise InvalidAdapterError([f"{where} must have an id and a content"])
    if not 0 < len(content) <= MAX_CONTENT:
        raise InvalidAdapterError([f"{where}: its content must have 1 to {MAX_CONTENT} characters"])
    if not all(isinstance(flag, bool) for flag in (is_special, *flags.values())):
        raise InvalidAdapterError([f"{where}: special, {', '.join(_FLAGS)} must be true or false"])
    return AddedToken(number, content, is_special, **flags)


def _new(tokens: list[AddedToken], base: BaseTokens) -> Iterator[AddedToken]:
    """The tokens that the base does not have; a token that both have must be the same."""
    contents = {number: content for content, number in base.ids.items()}
    for token in tokens:
        if base.ids.get(token.content, token.id) != token.id or contents.get(token.id, token.content) != token.content:
            reason = (
                f"{TOKENIZER_NAME}: the token {token.content[:50]!r} has the id {token.id}, which the base's tokenizer "
                "gives to another token, or this token to another id: only tokens may be added"
            )
            raise InvalidAdapterError([reason])
        if token.content not in base.ids:
            yield token


def _check_ids(tokens: tuple[AddedToken, ...], first: int, vocab_size: int) -> None:
    if len(tokens) > MAX_ADDED_TOKENS:
        raise InvalidAdapterError([f"{TOKENIZER_NAME} adds {len(tokens)} tokens; {MAX_ADDED_TOKENS} are allowed"])
    ids = [token.id for token in tokens]
    if ids != list(range(first, first + len(ids))):
        raise InvalidAdapterError(
            [f"{TOKENIZER_NAME}: the ids of the added tokens must be {first}, {first + 1}, ... without a gap"]
        )
    if ids and ids[-1] >= vocab_size:
        raise InvalidAdapterError(
            [f"{TOKENIZER_NAME} has the token id {ids[-1]}, but the adapter's embedding has {vocab_size} rows"]
        )
