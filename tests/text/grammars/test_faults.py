"""Errors of schemas, regexes and grammars name the place and are short, whatever was sent."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind, JsonStyle
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text
from tests.attempts import in_some_attempt
from tests.text.grammars.walking import allows

CONFIG = GrammarConfig()
STYLE = JsonStyle()
COMPILER = GrammarCompiler({300: "<tool>"}, 400, CONFIG)
ANY = {"type": "string"}
NARROW = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}}}
SCHEMAS: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"not": ANY}}}, "#/properties/a", "`not`"),
    ({"properties": {"a": {"type": "text"}}}, "#/properties/a", "text"),
    ({"properties": {"a/b": {"items": {"pattern": "(x"}}}}, "#/properties/a~1b/items", "unclosed group (character 1"),
    ({"required": ["n"], **NARROW}, "#", "nsatisfiable"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [ANY, {"minLength": "x"}]}}}, "#/$defs/a/anyOf/1", "minLength"),
    ({"$ref": "https://example.org/schema.json"}, "#", "another document"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "#/properties/a", "no schema"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a", "no text"),
    ({"oneOf": [ANY, {"type": "string", "minLength": 2}]}, "#", "anyOf"),
    ({"enum": ["a\x00"]}, "#/enum", "control character"),
    ({"format": "iri"}, "#", "iri"),
    ({"type": "string", "x-guidance": {"lenient": True}}, "", "x-guidance"),
    ({"enum": []}, "#", "nsatisfiable"),
    ([], "", "object"),
]  # fmt: skip


def error_of(kind: ConstraintKind, source: Any, style: JsonStyle = STYLE) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        checked_text(Constraint(kind, source, "field", style), COMPILER, CONFIG)
    assert raised.value.param == "field"
    return str(raised.value)


def assert_refused_at_once(schema: dict[str, Any], words: str) -> None:
    def refuse() -> None:
        start = time.process_time()
        assert words in error_of(ConstraintKind.JSON, schema)
        assert time.process_time() - start < 0.5

    in_some_attempt(refuse)


def checked(kind: ConstraintKind, source: Any, style: JsonStyle = STYLE) -> str:
    return checked_text(Constraint(kind, source, "field", style), COMPILER, CONFIG)


@pytest.mark.parametrize(("schema", "place", "words"), SCHEMAS)
def test_a_schemas_fault_is_named_with_its_place(schema: Any, place: str, words: str) -> None:
    message = error_of(ConstraintKind.JSON, schema)
    assert message.startswith(f"`field` at {place}: " if place else "`field`: ")
    assert words in message
    if isinstance(schema, dict):
        assert error_of(ConstraintKind.JSON, json.dumps(schema)) == message


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (ConstraintKind.REGEX, "a(?=b)", "look-around"),
        (ConstraintKind.REGEX, "ab[", "character 3"),
        (ConstraintKind.REGEX, r"(a)\1", "backreferences"),
        (ConstraintKind.REGEX, "[^\\s\\S]", "no text"),
        (ConstraintKind.REGEX, 5, "string"),
        (ConstraintKind.GRAMMAR, 'start: "a"\nb: "x', "line 2, column"),
        (ConstraintKind.GRAMMAR, "start: <nothing>", "<nothing>"),
        (ConstraintKind.GRAMMAR, '{"a": 1}\nstart: "a"', "line 1"),
        (ConstraintKind.GRAMMAR, 'root ::= "a', "line 1"),
        (ConstraintKind.GRAMMAR, 'root ::= b', "b"),
        (ConstraintKind.GRAMMAR, 'top ::= "b"', "root"),
        (ConstraintKind.GRAMMAR, 'root ::= "\\', "escape"),
        (ConstraintKind.GRAMMAR, "root ::= " + "(" * 9000, "deep"),
        (ConstraintKind.CHOICE, "a", "list"),
    ],
)  # fmt: skip
def test_other_faults_are_named_with_the_position(kind: ConstraintKind, source: Any, words: str) -> None:
    assert words in error_of(kind, source)


@pytest.mark.parametrize("kind", [ConstraintKind.REGEX, ConstraintKind.GRAMMAR, ConstraintKind.JSON])
def test_messages_are_short_whatever_was_sent(kind: ConstraintKind) -> None:
    long = "(" * 100_000
    assert len(error_of(kind, {"pattern": long} if kind is ConstraintKind.JSON else long)) < 1000
    assert len(error_of(kind, {long: long, "type": long} if kind is ConstraintKind.JSON else long)) < 1000


def test_deep_schemas_are_refused_before_they_are_compiled() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"items": schema}
    assert "deep" in error_of(ConstraintKind.JSON, schema)


def test_a_property_cannot_be_given_under_another_spelling() -> None:
    grammar = checked(ConstraintKind.JSON, {"type": "object", "properties": {"foo": {"type": "integer"}}})
    assert allows(grammar, '{"foo": 1, "bar": "x"}')
    assert not allows(grammar, '{"\\u0066oo": "x"}')


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T23:59:59Z"', '"2024-02-30T23:59:59Z"'),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"2024-01-01"', '"1924-01-01"'),
        ({"type": "string", "format": "password"}, '"x"', "1"),
        ({"type": "string", "pattern": "^\\S$"}, '"x"', '"\ufeff"'),
        ({"type": "string", "maxLength": 1.0}, '"x"', '"xx"'),
        ({"type": "string", "contentEncoding": "base64"}, '"eA=="', '"x"'),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.001}, "0.0005", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.0551}, "0.02", "0"),
        ({"type": "number", "exclusiveMinimum": -2.9965, "exclusiveMaximum": -2}, "-2.5", "-2"),
        ({"exclusiveMinimum": 100, "maximum": 100.5}, "100.25", "100"),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "1", "2"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": -5, "maximum": 1}, "0", "-1"),
        ({"type": "number", "multipleOf": 0.25}, "0.75", "0.3"),
    ],
)
def test_schemas_mean_what_json_schema_says(schema: dict[str, Any], right: str, wrong: str) -> None:
    grammar = checked(ConstraintKind.JSON, schema)
    assert allows(grammar, right)
    assert not allows(grammar, wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999983},
        {"type": "number", "multipleOf": 0.999983},
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"properties": {"a": {"multipleOf": 9973, "$ref": "#/$defs/b"}}, "$defs": {"b": {"multipleOf": 9967}}},
        {"multipleOf": -2147483649},
    ],
)
def test_numbers_that_take_gigabytes_to_divide_are_refused_at_once(schema: dict[str, Any]) -> None:
    assert_refused_at_once(schema, "multipleOf")


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": '"a+$', "maxLength": 2**31 - 1},
        {"type": ["string", "null"], "allOf": [{"pattern": '"a+$'}, {"maxLength": 300_000}]},
        {"$ref": "#/$defs/long", "pattern": '"a+$', "$defs": {"long": {"maxLength": 300_000}}},
        {"properties": {name: {"pattern": '"a+$', "maxLength": 50_000} for name in "abc"}},
    ],
)
def test_long_texts_whose_patterns_take_long_are_refused_at_once(schema: dict[str, Any]) -> None:
    assert_refused_at_once(schema, "maxLength")


def test_texts_with_patterns_may_be_long_and_others_longer() -> None:
    names = {"name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 65_535}}
    checked(ConstraintKind.JSON, {"properties": {**names, "text": {"type": "string", "maxLength": 10**9}}})


def test_an_object_may_have_two_thousand_properties() -> None:
    schema = {"properties": {f"property_{number}": {"type": "string"} for number in range(2000)}, "type": "object"}
    grammar = checked(ConstraintKind.JSON, schema)
    assert allows(grammar, '{"property_7": "a", "property_1999": "b"}')
    assert not allows(grammar, '{"property_7": 1}')


def test_blanks_come_to_an_end() -> None:
    """A small model may go on with blanks until `max_tokens`; every usual layout is allowed all the same."""
    value = {"a": [1, {"b": "c"}], "d": {}}
    grammar = checked(ConstraintKind.JSON_OBJECT, True)
    for indent in (None, 0, 2, 4, "\t"):
        assert allows(grammar, json.dumps(value, indent=indent))
    assert allows(grammar, json.dumps(value, separators=(",", ":")))
    assert not allows(grammar, '{"a":  1}')
    assert not allows(grammar, '{"a":\n\n1}')


def test_style_of_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    spaced, other = '{ "a":\n1 }', '{"a":1,"b":2}'
    assert allows(checked(ConstraintKind.JSON, schema), spaced)
    assert allows(checked(ConstraintKind.JSON, schema), other)
    assert not allows(checked(ConstraintKind.JSON, schema, JsonStyle(any_whitespace=False)), spaced)
    assert not allows(checked(ConstraintKind.JSON, schema, JsonStyle(whitespace_pattern=" ?")), spaced)
    assert not allows(checked(ConstraintKind.JSON, schema, JsonStyle(named_properties_only=True)), other)
    assert "field" in error_of(ConstraintKind.JSON, schema, JsonStyle(whitespace_pattern="("))
