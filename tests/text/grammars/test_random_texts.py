"""Whatever a checked grammar lets through is what the caller asked for: judged by `jsonschema` and by `re`."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text
from tests.text.grammars.schemas import REGEXES, SCHEMAS, TEXTS
from tests.text.grammars.walking import drawn

COMPILER = GrammarCompiler({}, 0, GrammarConfig())
FORMATS = Draft202012Validator.FORMAT_CHECKER


def checked(kind: ConstraintKind, source: Any) -> str:
    return checked_text(Constraint(kind, source, "field"), COMPILER, GrammarConfig())


@given(SCHEMAS, st.integers(0, 2**32))
def test_texts_of_a_schema_are_valid(schema: dict[str, Any], seed: int) -> None:
    try:
        grammar = checked(ConstraintKind.JSON, schema)
    except InvalidRequestError:
        assume(False)
    text = drawn(grammar, seed)
    assume(text is not None)
    assert text is not None
    Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


@given(REGEXES, st.integers(0, 2**32))
def test_texts_of_a_regex_are_matched_whole(regex: str, seed: int) -> None:
    text = drawn(checked(ConstraintKind.REGEX, regex), seed)
    assume(text is not None)
    assert text is not None
    assume(all(unicodedata.category(character) != "Cn" for character in text))  # newer than this Python's Unicode
    assert re.fullmatch(regex, text)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(0, 2**32))
def test_texts_of_choices_are_among_them(choices: list[str], seed: int) -> None:
    assert drawn(checked(ConstraintKind.CHOICE, choices), seed) in choices
