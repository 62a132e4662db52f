"""llama.cpp's grammars become Lark that lets through the same texts, in a time that grows with their length."""

from __future__ import annotations

import time

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from lora_serve.text.grammars.lark import is_lark, to_lark
from tests.attempts import in_some_attempt
from tests.text.grammars.walking import allows, drawn

# A JSON grammar as llama.cpp's users write it.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws     ::= [ \t\n]{0,5}
"""


@pytest.mark.parametrize(
    ("text", "is_right"),
    [('{"a": [1, -2.5, "x\\n"], "b": {}}', True), ('{"a": 1', False), ("[1]", False), ('{"a": 01}', False)],
)
def test_json_in_gbnf(text: str, is_right: bool) -> None:
    assert allows(to_lark(JSON), text) is is_right


@pytest.mark.parametrize("seed", range(5))
def test_texts_are_those_of_the_librarys_own_translation(seed: int) -> None:
    text = drawn(to_lark(JSON), seed, 2000)
    assert text is None or allows(gbnf_to_lark(JSON), text)


def test_names_that_differ_in_case_alone_stay_apart() -> None:
    lark = to_lark('root ::= ab Ab aB\nab ::= "1"\nAb ::= "2"\naB ::= "3"')
    assert allows(lark, "123")


def test_rules_in_an_unlucky_order_take_no_longer() -> None:
    rules = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000)) + '\nr3000 ::= "x"'

    def translate() -> None:
        began = time.process_time()
        to_lark(rules)
        assert time.process_time() - began < 1.5

    in_some_attempt(translate)


def test_lark_is_known_from_gbnf() -> None:
    assert is_lark('start: "a"')
    assert is_lark("%llguidance {}\nstart: x")
    assert not is_lark(JSON)
