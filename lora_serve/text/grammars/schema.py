"""A caller's JSON schema -> one in whose terms `llguidance` is exact.

Where it would let through what the schema forbids (30 February as a `date`, `\\S` for a character that JSON Schema
takes for a blank), the schema is written more narrowly. What it does not know is left to it to refuse.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from lora_serve.text.grammars import refused
from lora_serve.text.grammars.cost import SchemaCost, SchemaPlace

KNOWN_FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))  # by llguidance, exactly
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# RFC 3339 without leap seconds, which are right in a few minutes of history only.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]{0,9})(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
# https://json-schema.org/draft/2020-12/json-schema-validation#section-7.3; all others are notes for people.
STANDARD_FORMATS = frozenset(
    (
        *KNOWN_FORMATS,
        *FORMAT_PATTERNS,
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "regex",
        "uri-reference",
        "uri-template",
    )
)
TABLES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")  # of schemas, by name
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # of schemas
SINGLE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NOT_BLANK = re.compile(r"(?<!\\)((?:\\\\)*)\\S")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # those without an escape of their own
MAX_SEARCH_SECONDS = 0.3  # for a faulty place; the one found by then is shown
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of each schema that stands directly in another; definitions come first."""
    if not isinstance(schema, dict):
        return
    for keyword in TABLES:
        if isinstance(table := schema.get(keyword), dict):
            for name, inner in table.items():
                yield f"/{keyword}/{escaped(name)}", inner
    for keyword in (*LISTS, *SINGLE):
        value = schema.get(keyword)
        if isinstance(value, list):
            for number, inner in enumerate(value):
                yield f"/{keyword}/{number}", inner
        elif isinstance(value, dict | bool) and keyword in SINGLE:
            yield f"/{keyword}", value


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


class SchemaWriter:
    """Writes one schema anew. `named_only`: objects with named properties have no others unless they say so."""

    def __init__(self, param: str, max_regex: int, *, named_only: bool = False) -> None:
        self._param = param
        self._max_regex = max_regex
        self._named_only = named_only
        self._cost = SchemaCost()
        self._refs: list[tuple[SchemaPlace, str]] = []  # the place of each, and the pointer

    def write(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The whole schema. Raises InvalidRequestError."""
        made: dict[str, Any] = self._written(schema, self._cost.places.root)
        for place, pointer in self._refs:
            target = self._cost.places.find(pointer)
            if target is None:
                raise refused(self._param, f"$ref {pointer!r} points to no schema in this one", str(place))
            self._cost.refs.append((place, target))
        if problem := self._cost.problem(self._max_regex):
            raise refused(self._param, problem)
        return made

    def _written(self, schema: Any, place: SchemaPlace) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._cost.add(schema)
        self._note_ref(schema, place)
        self._check_texts(schema, place)
        made = {name: self._value(name, value, place) for name, value in schema.items()}
        self._narrow(made, place)
        return made

    def _check_texts(self, schema: Mapping[str, Any], place: SchemaPlace) -> None:
        """Refuse characters that JSON could only write as an escape that no answer holds."""
        names = schema.get("properties")
        texts = {name: schema.get(name) for name in ("const", "enum", "required")}
        for name, value in {**texts, "properties": list(names) if isinstance(names, dict) else None}.items():
            if _has_control_character(value):
                raise refused(self._param, "a control character cannot be part of an answer", f"{place}/{name}")

    def _note_ref(self, schema: Mapping[str, Any], place: SchemaPlace) -> None:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return
        if place.around is not None and ("$id" in schema or "id" in schema):
            reason = "$ref beside an id means something else in each draft of JSON Schema"
            raise refused(self._param, reason, str(place))
        if ref == "#" or ref.startswith("#/"):
            self._refs.append((place, unquote(ref)))

    def _value(self, name: str, value: Any, place: SchemaPlace) -> Any:
        """The value of one keyword; of others than those that hold schemas as it is."""
        if name in TABLES and isinstance(value, dict):
            change = _pattern if name == "patternProperties" else str
            return {change(key): self._inner(item, place, f"/{name}/{escaped(key)}") for key, item in value.items()}
        if isinstance(value, list) and (name in LISTS or name == "items"):
            return [self._inner(item, place, f"/{name}/{number}") for number, item in enumerate(value)]
        if name in SINGLE:
            return self._inner(value, place, f"/{name}")
        if name == "pattern" and isinstance(value, str):
            return _pattern(value)
        if name in COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _inner(self, schema: Any, around: SchemaPlace, part: str) -> Any:
        return self._written(schema, self._cost.places.add(around, part))

    def _narrow(self, made: dict[str, Any], place: SchemaPlace) -> None:
        """Change what `llguidance` would take too widely, and leave out what says nothing."""
        if made.get("uniqueItems") is False:
            del made["uniqueItems"]
        if self._named_only and any(isinstance(made.get(name), dict) for name in ("properties", "patternProperties")):
            made.setdefault("additionalProperties", False)
        patterns: list[str] = []
        kind = made.get("format")
        if isinstance(kind, str) and kind not in STANDARD_FORMATS:
            del made["format"]  # for people, as JSON Schema has it
        elif isinstance(kind, str) and kind in FORMAT_PATTERNS:
            del made["format"]
            patterns.append(FORMAT_PATTERNS[kind])
        elif isinstance(kind, str) and kind not in KNOWN_FORMATS:
            raise refused(self._param, f"the format {kind!r} is not supported", str(place))
        multiple = made.get("multipleOf")
        if isinstance(multiple, int | float) and multiple < 0:  # with some the compiler never ends
            raise refused(self._param, "`multipleOf` must be above 0", str(place))
        if made.get("contentEncoding") == "base64":
            patterns.append(_BASE64)
        if made.get("contentMediaType") == "application/json":
            raise refused(self._param, "JSON inside a string (contentMediaType) is not supported", str(place))
        _add_patterns(made, patterns)
        if made.get("type") != "integer":
            try:
                _close_bounds(made)
            except OverflowError:
                raise refused(self._param, "a bound is beyond the largest number there is", str(place)) from None


def _close_bounds(made: dict[str, Any]) -> None:
    """Write a bound that a number must not reach as one that it may: with both bounds, `llguidance` lets numbers reach
    those that are whole. The new bound lies a billionth beyond the old one.
    """
    sides = (("exclusiveMinimum", "minimum", 1, max), ("exclusiveMaximum", "maximum", -1, min))
    for name, closed, sign, tighter in sides:
        bound = made.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != int(bound):
            continue
        new = bound + sign * 10.0 ** (len(str(abs(int(bound)))) - 10)
        other = made.get(closed)
        made[closed] = tighter(new, other) if isinstance(other, int | float) and not isinstance(other, bool) else new
        del made[name]


def _has_control_character(value: Any) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if _CONTROL.search(item):
                return True
        elif isinstance(item, dict):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return False


def _add_patterns(made: dict[str, Any], patterns: list[str]) -> None:
    if patterns and "pattern" not in made:
        made["pattern"] = patterns.pop()
    if patterns:
        others = made.get("allOf", [])
        made["allOf"] = [*(others if isinstance(others, list) else [others]), *({"pattern": one} for one in patterns)]


def _pattern(regex: str) -> str:
    r"""ECMA-262's \S: the byte order mark is a blank there."""
    return _NOT_BLANK.sub(r"\1[^\\s\\x{FEFF}]", regex)


def faulty_place(schema: Mapping[str, Any], error: str, fault: Callable[[Mapping[str, Any]], str]) -> str:
    """JSON pointer of the innermost schema that has the same error by itself: `llguidance` says what is wrong, not
    where. `fault`: the error of a schema.
    """
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, inner, until = "#", schema, time.monotonic() + MAX_SEARCH_SECONDS
    while True:
        for pointer, child in subschemas(inner):
            if time.monotonic() > until:
                return place
            if isinstance(child, dict) and fault({**definitions, **child}) == error:
                place, inner = place + pointer, child
                break
        else:
            return place
