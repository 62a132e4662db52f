"""A constraint -> the text of a grammar, as `LLMatcher.grammar_from_json_schema` and its siblings would write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from lora_serve.core.strict_json import JsonError, parse_json
from lora_serve.text.grammars.constraint import Constraint, ConstraintKind, JsonStyle
from lora_serve.text.grammars.faults import refused

MAX_DEPTH = 100  # of values inside one another; the parser's own limit is a little higher
_ANY_OBJECT = {"type": "object"}


def grammar_text(constraint: Constraint, max_bytes: int) -> str:
    """The text of the grammar, which may still be wrong. Raises InvalidRequestError."""
    return _WRITERS[constraint.kind](constraint, max_bytes)


def schema_grammar(schema: Mapping[str, Any], style: JsonStyle) -> str:
    """The text of the grammar of a JSON schema."""
    options = {
        "whitespace_flexible": style.any_whitespace,
        "whitespace_pattern": style.whitespace_pattern,
        "lenient": False,
        "coerce_one_of": False,
    }
    return '{"grammars":[{"json_schema":%s}]}' % written({**schema, "x-guidance": options})  # noqa: UP031 (braces)


def content(constraint: Constraint) -> bytes:
    """The constraint as bytes: equal ones ask for the same. Its source should not be large, see `measured`."""
    style = constraint.style
    return written((constraint.kind, constraint.source, astuple(style))).encode()


def measured(value: Any, most: int) -> int:
    """Roughly the number of characters of a value's JSON text, never more; counted up to a little above `most`."""
    num_characters, left = 0, [value]
    while left and num_characters <= most:
        item = left.pop()
        num_characters += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            num_characters += sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return num_characters


def written(value: Any) -> str:
    """The JSON text of a value."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json(constraint: Constraint, max_bytes: int) -> str:
    schema = read_schema(constraint.source, constraint.param, max_bytes)
    if constraint.style.named_properties_only:
        schema = with_named_properties_only(schema)
    return schema_grammar(schema, constraint.style)


def _json_object(constraint: Constraint, max_bytes: int) -> str:
    return schema_grammar(_ANY_OBJECT, constraint.style)


def _regex(constraint: Constraint, max_bytes: int) -> str:
    regex: str = LLMatcher.grammar_from_regex(_text_of(constraint, max_bytes))
    return regex


def _choice(constraint: Constraint, max_bytes: int) -> str:
    choices, param = constraint.source, constraint.param
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refused(param, "expected a list of one or more strings.")
    check_size(sum(len(choice.encode()) + 1 for choice in choices), param, max_bytes)
    return "start: " + " | ".join(map(written, dict.fromkeys(choices)))


def _grammar(constraint: Constraint, max_bytes: int) -> str:
    text = _text_of(constraint, max_bytes)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # it raises bare ones, and RecursionError
        reason = "the rules are nested too deeply." if isinstance(error, RecursionError) else str(error)
        raise refused(constraint.param, reason) from None
    return str(LLMatcher.grammar_from_lark(lark))


def _structural_tag(constraint: Constraint, max_bytes: int) -> str:
    raise refused(constraint.param, "structural tags are not supported yet.")


_WRITERS: Mapping[ConstraintKind, Callable[[Constraint, int], str]] = {
    ConstraintKind.JSON: _json,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.STRUCTURAL_TAG: _structural_tag,
}


def read_schema(source: Any, param: str, max_bytes: int) -> dict[str, Any]:
    """A JSON schema, given as a value or as its text. Raises InvalidRequestError."""
    if isinstance(source, str):
        check_size(len(source.encode()), param, max_bytes)
        try:
            source = parse_json(source.encode(), max_depth=MAX_DEPTH)
        except JsonError as error:
            raise refused(param, f"the text {error}") from None
    if isinstance(source, bool):
        source = {} if source else {"enum": []}
    if not isinstance(source, dict):
        raise refused(param, "expected a JSON schema, which is an object.")
    if "x-guidance" in source:
        raise refused(param, "`x-guidance` is not taken from a request.")
    return source


def check_size(num_bytes: int, param: str, max_bytes: int) -> None:
    """Raises InvalidRequestError."""
    if num_bytes > max_bytes:
        raise refused(param, f"{num_bytes} bytes are more than {max_bytes} (--max-grammar-size).")


def with_named_properties_only(schema: Any) -> Any:
    """The schema, in which every object with named properties has no others unless it says so."""
    if isinstance(schema, list):
        return [with_named_properties_only(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: with_named_properties_only(value) for name, value in schema.items() if name not in _VALUES}
    made = {name: made.get(name, value) for name, value in schema.items()}
    if any(isinstance(schema.get(name), dict) for name in ("properties", "patternProperties")):
        made.setdefault("additionalProperties", False)
    return made


_VALUES = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are no schemas


def _text_of(constraint: Constraint, max_bytes: int) -> str:
    if not isinstance(constraint.source, str):
        raise refused(constraint.param, "expected a string.")
    check_size(len(constraint.source.encode()), constraint.param, max_bytes)
    return constraint.source
