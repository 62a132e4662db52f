"""Structural tags in both of vLLM's forms: what the grammar lets through, and what is refused with the place."""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text
from tests.text.grammars.walking import allows

COMPILER = GrammarCompiler({300: "<tool_call>"}, 400, GrammarConfig())
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OLDER = {
    "triggers": ["<function="],
    "structures": [{"begin": "<function=weather>", "schema": CITY, "end": "</function>"}],
}
CONTENT = {"type": "json_schema", "json_schema": CITY}
WEATHER = {"type": "tag", "begin": "<function=weather>", "content": CONTENT, "end": "</function>"}
CALL = '<function=weather>{"city": "Ulm"}</function>'


def checked(source: Any) -> str:
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAG, source, "field")
    return checked_text(constraint, COMPILER, GrammarConfig())


def newer(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": value}


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        (OLDER, f"Let me see: {CALL} and {CALL}.", '<function=weather>{"town": 1}</function>'),
        (newer({"type": "triggered_tags", "triggers": ["<function="], "tags": [WEATHER]}), f"a {CALL}", "<function=x>"),
        (
            newer({"type": "triggered_tags", "triggers": ["<f"], "tags": [WEATHER], "at_least_one": True}),
            f"a {CALL} b",
            "nothing",
        ),
        (newer(WEATHER), CALL, f"{CALL}."),
        (newer({"type": "const_string", "value": 'a"b'}), 'a"b', "a"),
        (newer({"type": "regex", "pattern": "[0-9]/[0-9]"}), "1/2", "12"),
        (newer({"type": "any_text"}), "any\nthing", None),
        (newer({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}), "<t>x</t>", "<t>x"),
        (
            newer({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, WEATHER]}),
            f"x{CALL}",
            CALL,
        ),
        (newer({"type": "or", "elements": [{"type": "const_string", "value": "x"}, WEATHER]}), "x", "y"),
        (newer({"type": "tags_with_separator", "tags": [WEATHER], "separator": ";"}), f"{CALL};{CALL}", CALL * 2),
    ],
)
def test_tags_let_through_what_they_describe(source: Any, right: str, wrong: str | None) -> None:
    grammar = checked(source)
    assert allows(grammar, right)
    assert wrong is None or not allows(grammar, wrong)


def test_the_text_of_a_special_token_is_the_token() -> None:
    tag = {**WEATHER, "begin": "<tool_call>weather"}
    grammar = checked(newer({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}))
    assert "<[300]>" in grammar
    assert '"<tool_call>"' not in grammar


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ({}, "structures"),
        ({**OLDER, "triggers": []}, "triggers"),
        ({**OLDER, "triggers": ["<tool"]}, "tags[0]"),
        (newer({"type": "grammar", "grammar": "root ::= x"}), "format"),
        (newer({"type": "or", "elements": [{"type": "qwen_xml_parameter"}]}), "format.elements[0]"),
        (newer({**WEATHER, "begin": 5}), "format.begin"),
        (newer({**WEATHER, "content": {"type": "json_schema", "json_schema": {"not": {}}}}), "not"),
        (newer({"type": "sequence", "elements": [{"type": "any_text"}, WEATHER]}), "any_text"),
        ("{", "JSON"),
        (5, "object"),
    ],
)
def test_tags_that_cannot_be_said_are_refused_with_the_place(source: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        checked(source)
    assert place in str(raised.value)
