"""Special tokens that a caller's grammar names in Lark become their ids, and nothing else does."""

from __future__ import annotations

import pytest

from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text

CONFIG = GrammarConfig()
COMPILER = GrammarCompiler({300: "<|tool|>", 301: "<b>"}, 302, CONFIG)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("start: <|tool|>", "start: <[300]>"),
        ('start: <|tool|>{2} "<|tool|>" <b>', 'start: <[300]>{2} "<|tool|>" <[301]>'),
        ('start: "\\"<b>" /<b>\\/<b>/ <b> // <b>', 'start: "\\"<b>" /<b>\\/<b>/ <[301]> // <b>'),
        ('start: a # "a <b> /\na: <b> "x"', 'start: a # "a <b> /\na: <[301]> "x"'),
        ("start: a <[300]>\na: /(?s:.<b>\n<b>)/ <b>", "start: a <[300]>\na: /(?s:.<b>\n<b>)/ <[301]>"),
    ],
)
def test_named_tokens_are_numbered_outside_of_literals(given: str, expected: str) -> None:
    assert checked_text(Constraint(ConstraintKind.GRAMMAR, given, "field"), COMPILER, CONFIG) == expected


def test_schema_within_a_grammar_keeps_its_text() -> None:
    given = 'start: <b> %json {"enum": ["<b>", "\\"<b>"]} <b>'
    found = checked_text(Constraint(ConstraintKind.GRAMMAR, given, "field"), COMPILER, CONFIG)
    assert found.startswith("start: <[301]> %json")
    assert found.endswith("} <[301]>")
    assert found.count("<b>") == 2
