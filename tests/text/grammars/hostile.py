"""Schemas, regexes and grammars that would take long, or overflow the compiler's stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lora_serve.text.grammars import ConstraintKind

JSON, REGEX, GRAMMAR = ConstraintKind.JSON, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
TAG = ConstraintKind.STRUCTURAL_TAG


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


def regexes(*patterns: str) -> dict[str, Any]:
    """A structural tag of regexes, one behind the other."""
    elements = [{"type": "regex", "pattern": pattern} for pattern in patterns]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


ALONE = chain(1500, lambda ref: {"items": ref})  # as a part, its references mean the definitions around it
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
    "part that is a chain by itself": (
        JSON, {"$defs": {"p": ALONE, **{name: {} for name in ALONE["$defs"]}}, "contains": {}}
    ),
    "bound beyond all numbers": (JSON, {"type": "number", "exclusiveMinimum": 10**400}),
    "schema behind a regex of a tag": (TAG, regexes("a\\", f" %json {json.dumps(chain(500, inside))} #")),
    "chain of rules in groups": (
        GRAMMAR, "start: r0\n" + "".join(f'r{i}: {"(" * 20}"a" r{i + 1}{")?" * 20}\n' for i in range(250)) + 'r250: "x"'
    ),
    "long regex of a tag": (TAG, regexes("a?" * 15_000)),
    "long regexes of a tag": (TAG, regexes(*["a?" * 2000] * 200)),
    "long regex": (REGEX, "a?" * 15_000 + "a" * 15_000),
    "chain of rules": (GRAMMAR, "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2000)) + '\na2000: "x"'),
    "chain of GBNF rules": (GRAMMAR, "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(900))),
    "schema in Lark": (GRAMMAR, f"start: %json {chain(300, inside)}".replace("'", '"')),
    "strings without an end": (GRAMMAR, 'start: "a"\n' + '"\\' * 15_000),
    "regexes without an end": (GRAMMAR, 'start: "a"\n' + "/\\" * 15_000),
    "empty lines": (GRAMMAR, "\n" * 32_000 + "x"),
    "schema in a comment": (GRAMMAR, 'start: "a" // %json {}'),
    "schema that is none": (GRAMMAR, "start: %json {"),
    "brackets": (GRAMMAR, "start: " + "(" * 10_000 + '"x"' + ")" * 10_000),
}  # fmt: skip
