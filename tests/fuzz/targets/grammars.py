"""What a caller asks an answer to be: a schema, a regex, a grammar, a tag; as far as it is compiled once."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.server.json_body import parse_json
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text
from tests.fuzz.mutating import within, written

ERRORS = (InvalidRequestError,)
CONFIG = GrammarConfig()
COMPILER = GrammarCompiler({258: "<|im_end|>"}, 259, CONFIG)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^a+$", "maxLength": 5},
        "b": {"$ref": "#/$defs/n"},
        "c": {"anyOf": [{"const": 1}, {"enum": ["x", None]}]},
        "d": {"type": "array", "items": {"type": "integer", "minimum": 3}, "maxItems": 4, "prefixItems": [{}]},
        "e": {"format": "date-time", "type": "string"},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": ["number", "null"], "multipleOf": 0.5, "exclusiveMaximum": 9}},
    "patternProperties": {"^x": {"type": "boolean"}},
}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
}
TEXTS = {
    "regex": ("a+(b|[c-e]{2,3})?\\d*", "(?i)x.y", "(a|a)*b{1000}", "\\p{L}+", "(?P<n>a)"),
    "grammar": (
        'start: "a" b\nb: /[0-9]+/ | %json {"type": "object"}',
        'root ::= "a" | [b-z]+ root?',
        "start: start start",
        "start: X\nX: /a/",
        "start: <[258]> | <|im_end|>",
    ),
}


def fuzz(data: bytes) -> None:
    """{"kind": ..., "source": ...}"""
    given = parse_json(data)
    if not isinstance(given, dict) or given.get("kind") not in list(ConstraintKind):
        raise InvalidRequestError("no constraint")
    checked_text(Constraint(ConstraintKind(given["kind"]), given.get("source"), "field"), COMPILER, CONFIG)


def seeds() -> Iterator[bytes]:
    yield written({"kind": "json", "source": SCHEMA})
    yield written({"kind": "json", "source": json.dumps(SCHEMA)})
    yield written({"kind": "json_object", "source": None})
    yield written({"kind": "choice", "source": ["a", 'b"', ""]})
    yield written({"kind": "structural_tag", "source": TAG})
    yield from (written({"kind": kind, "source": text}) for kind, texts in TEXTS.items() for text in texts)


_WORDS = (
    *ConstraintKind,
    *SCHEMA,
    "items",
    "minItems",
    "minLength",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "#",
    "#/$defs/n",
    "string",
    "number",
    "integer",
    "array",
    "object",
    "null",
    "boolean",
    "propertyNames",
    "contains",
    "uniqueItems",
    "enum",
    "const",
    "dependentRequired",
    "unevaluatedProperties",
    "$anchor",
    "$id",
    "%regex {",
    "root ::= ",
    "start: ",
    "{0,99999}",
    "(?:",
    "[^",
    "\\b",
    "\\uD800",
    "/",
    "|",
    "*",
    "%ignore",
    "email",
    "uuid",
    "uri",
    "ipv4",
    "format",
)
mutate = within(json.loads, written, _WORDS)
