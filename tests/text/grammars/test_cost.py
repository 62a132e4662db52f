"""Schemas and grammars that would take long, or overflow the compiler's stack, are refused before it sees them."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind, JsonStyle
from lora_serve.text.grammars.checking import GrammarCompiler, checked_own_text, checked_text, json_schema_of
from tests.attempts import in_some_attempt
from tests.text.grammars.hostile import CIRCLES, GRAMMAR, HOSTILE, JSON, REGEX, chain, inside

CONFIG = GrammarConfig()
COMPILER = GrammarCompiler({}, 0, CONFIG)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ones_are_refused_soon(name: str) -> None:
    kind, source = HOSTILE[name]

    def refuse() -> pytest.ExceptionInfo[InvalidRequestError]:
        began = time.monotonic()
        with pytest.raises(InvalidRequestError) as raised:
            checked_text(Constraint(kind, source, "field"), COMPILER, CONFIG)
        assert time.monotonic() - began < 2
        return raised

    raised = in_some_attempt(refuse)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("kind", [JSON, ConstraintKind.JSON_OBJECT])
def test_long_pattern_of_blanks_is_refused(kind: ConstraintKind) -> None:
    source = True if kind is ConstraintKind.JSON_OBJECT else {}
    style = JsonStyle(whitespace_pattern=" ?" * 20_000)
    with pytest.raises(InvalidRequestError, match="max-regex-size"):
        checked_text(Constraint(kind, source, "field", style), COMPILER, CONFIG)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, chain(100, inside)),
        (JSON, chain(150, lambda ref: {"allOf": [ref, ref, {"minimum": 1}]})),
        (JSON, {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}),
        (JSON, {"$defs": CIRCLES, "anyOf": [{"type": "string"}, {"$ref": "#/$defs/d1"}]}),
        (JSON, {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(400)}}),
        (REGEX, "(a{1,100000}){1,100000}"),
        (REGEX, "((a+)+)+b"),
        (REGEX, "|".join(f"word{i}" for i in range(1500))),
        (ConstraintKind.CHOICE, [f"choice {i}" for i in range(10_000)]),
        (GRAMMAR, 'start: "a" %json {"type": "object"} /x+/ // a comment'),
    ],
)  # fmt: skip
def test_large_and_recursive_ones_are_taken_soon(kind: ConstraintKind, source: Any) -> None:
    def take() -> None:
        began = time.monotonic()
        checked_text(Constraint(kind, source, "field"), COMPILER, CONFIG)
        assert time.monotonic() - began < 2

    in_some_attempt(take)


@pytest.mark.parametrize("inner", [{"anyOf": [{}] * 8000}, {"properties": {f"p{i}": {} for i in range(1900)}}])
def test_memory_grows_with_a_schemas_length_also_below_long_names(inner: dict[str, Any]) -> None:
    schema = {"properties": {"k" * 60_000: inner, "r": {"$ref": "#/properties/r"}}}
    tracemalloc.start()
    try:
        json_schema_of(Constraint(JSON, schema, "field"), CONFIG)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_what_is_too_large_behind_the_first_token_is_seen() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
    config = GrammarConfig(max_grammar_items=2000)
    with pytest.raises(InvalidRequestError):
        checked_text(Constraint(JSON, many, "field"), GrammarCompiler({}, 0, config), config)


def test_schemas_in_the_servers_own_grammars_are_held_to_the_same() -> None:
    text = checked_own_text('start: %json {"type": "string", "format": "date"}', "tools", COMPILER, CONFIG)
    assert '"format"' not in text
    whole = '{"grammars": [{"json_schema": {"type": "string", "format": "date"}}]}'
    assert '"format"' not in checked_own_text(whole, "tools", COMPILER, CONFIG)
    spaced = checked_own_text(
        'start: %json {"type": "object", "x-guidance": {"key_separator": ": "}}', "tools", COMPILER, CONFIG
    )
    assert '"key_separator":": "' in spaced
    assert checked_own_text(spaced, "tools", COMPILER, CONFIG) == spaced
    with pytest.raises(InvalidRequestError):
        checked_own_text('start: %json {"x-guidance": {"lenient": true}}', "tools", COMPILER, CONFIG)
    with pytest.raises(InvalidRequestError):
        checked_own_text('start: %json {"not": {}}', "tools", COMPILER, CONFIG)
