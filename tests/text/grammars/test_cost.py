"""Schemas and grammars that would take long, or overflow the compiler's stack, are refused before it sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lora_serve.core.config import GrammarConfig
from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.grammars.checking import checked_own_text, checked_text
from lora_serve.text.grammars.compiling import GrammarCompiler
from lora_serve.text.grammars.constraint import Constraint, ConstraintKind

CONFIG = GrammarConfig()
COMPILER = GrammarCompiler({}, 0, CONFIG)
JSON, REGEX, GRAMMAR = ConstraintKind.JSON, ConstraintKind.REGEX, ConstraintKind.GRAMMAR


def chain(length: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """A schema that refers to one that refers to one ..."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}}


def inside(ref: dict[str, str]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": ref}, "required": ["x"]}


def deep(ref: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = ref
    for _ in range(40):
        made = {"items": made}
    return made


CIRCLES = {f"d{i}": inside({"$ref": f"#/$defs/d{(i * 7) % 90}"}) for i in range(90)}
HOSTILE: dict[str, tuple[ConstraintKind, Any]] = {
    "chain of references": (JSON, chain(2000, lambda ref: ref)),
    "chain through properties": (JSON, chain(1200, inside)),
    "chain through allOf": (JSON, chain(2000, lambda ref: {"allOf": [ref]})),
    "chain of deep schemas": (JSON, chain(30, deep)),
    "circle of references": (JSON, {**chain(1000, inside), "$ref": "#/$defs/a999"}),
    "many properties": (JSON, {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}),
    "many patterns of names": (JSON, {"patternProperties": {f"^{i}x": {} for i in range(500)}}),
    "long pattern": (JSON, {"type": "string", "pattern": "a?" * 15_000 + "a" * 15_000}),
    "long patterns": (JSON, {"anyOf": [{"type": "string", "pattern": "(.*)*" * 2000 + str(i)} for i in range(20)]}),
    "long regex": (REGEX, "a?" * 15_000 + "a" * 15_000),
    "chain of rules": (GRAMMAR, "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2000)) + '\na2000: "x"'),
    "chain of GBNF rules": (GRAMMAR, "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(900))),
    "schema in Lark": (GRAMMAR, f"start: %json {chain(300, inside)}".replace("'", '"')),
    "schema in a comment": (GRAMMAR, 'start: "a" // %json {}'),
    "schema that is none": (GRAMMAR, "start: %json {"),
    "brackets": (GRAMMAR, "start: " + "(" * 10_000 + '"x"' + ")" * 10_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ones_are_refused_soon(name: str) -> None:
    kind, source = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as raised:
        checked_text(Constraint(kind, source, "field"), COMPILER, CONFIG)
    assert time.monotonic() - began < 2
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, chain(100, inside)),
        (JSON, chain(150, lambda ref: {"allOf": [ref, ref, {"minimum": 1}]})),
        (JSON, {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}),
        (JSON, {"$defs": CIRCLES, "anyOf": [{"type": "string"}, {"$ref": "#/$defs/d1"}]}),
        (JSON, {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}),
        (REGEX, "(a{1,100000}){1,100000}"),
        (REGEX, "((a+)+)+b"),
        (REGEX, "|".join(f"word{i}" for i in range(1500))),
        (ConstraintKind.CHOICE, [f"choice {i}" for i in range(10_000)]),
        (GRAMMAR, 'start: "a" %json {"type": "object"} /x+/ // a comment'),
    ],
)  # fmt: skip
def test_large_and_recursive_ones_are_taken_soon(kind: ConstraintKind, source: Any) -> None:
    began = time.monotonic()
    checked_text(Constraint(kind, source, "field"), COMPILER, CONFIG)
    assert time.monotonic() - began < 2


def test_schemas_in_the_servers_own_grammars_are_held_to_the_same() -> None:
    text = checked_own_text('start: %json {"type": "string", "format": "date"}', "tools", COMPILER, CONFIG)
    assert '"format"' not in text
    whole = '{"grammars": [{"json_schema": {"type": "string", "format": "date"}}]}'
    assert '"format"' not in checked_own_text(whole, "tools", COMPILER, CONFIG)
    with pytest.raises(InvalidRequestError):
        checked_own_text('start: %json {"not": {}}', "tools", COMPILER, CONFIG)
