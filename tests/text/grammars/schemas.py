"""JSON schemas and regexes of the kinds that callers send, drawn by Hypothesis."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

Schemas = st.SearchStrategy[dict[str, Any]]
NAMES = st.text(string.ascii_letters + ' _-"\\/éß😀', min_size=1, max_size=6)
TEXTS = st.text(string.ascii_letters + string.digits + ' "\\/\n\té😀', max_size=5)
NUMBERS = st.integers(-200, 200) | st.sampled_from([-1.5, 0.25, 2.0, 99.9])
PATTERNS = st.sampled_from(
    ["^[a-z]{2,5}$", "ab+c", "^\\d{3}-\\d{2}$", "^(a|bc)*$", "[^x]$", "^\\w+@\\w+\\.de$", "^\\S+$", "^.{1,4}$", "é"]
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "json-pointer")


def _ordered(low: str, high: str, values: st.SearchStrategy[Any]) -> Schemas:
    return st.lists(values, min_size=2, max_size=2).map(lambda pair: {low: min(pair), high: max(pair)})


_VALUES = TEXTS | NUMBERS | st.none() | st.booleans()
_CONSTANTS = TEXTS | st.lists(NUMBERS, max_size=2) | st.dictionaries(NAMES, TEXTS, max_size=2)
LEAVES: Schemas = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]),
    st.builds(lambda bounds: {"type": "string", **bounds}, _ordered("minLength", "maxLength", st.integers(0, 8))),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
    st.builds(lambda kind: {"type": "string", "format": kind}, st.sampled_from(FORMATS)),
    st.builds(lambda bounds: {"type": "integer", **bounds}, _ordered("minimum", "maximum", st.integers(-300, 300))),
    st.builds(lambda bounds: {"type": "number", **bounds}, _ordered("minimum", "maximum", NUMBERS)),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 9}, NUMBERS),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 12)),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, _CONSTANTS),
    st.just({"type": ["string", "null"]}),
)


def _object(properties: dict[str, Any], required: list[bool], others: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    made["required"] = [name for name, wanted in zip(properties, required, strict=False) if wanted]
    return made if others is None else {**made, "additionalProperties": others}


def _larger(inner: Schemas) -> Schemas:
    return st.one_of(
        st.builds(
            _object,
            st.dictionaries(NAMES, inner, max_size=4),
            st.lists(st.booleans(), min_size=4, max_size=4),
            st.just(False) | st.none() | inner,
        ),
        st.builds(
            lambda items, bounds: {"type": "array", "items": items, **bounds},
            inner,
            _ordered("minItems", "maxItems", st.integers(0, 3)) | st.just({}),
        ),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
            st.lists(inner, min_size=1, max_size=2),
            st.just(False) | inner,
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"allOf": [one]}, inner),
    )


_REF: Schemas = st.just({"$ref": "#/$defs/x"})
SCHEMAS: Schemas = st.builds(
    lambda schema, x: {**schema, "$defs": {"x": x}},
    st.recursive(LEAVES | _REF, _larger, max_leaves=6),
    st.recursive(LEAVES, _larger, max_leaves=3),
)
REGEXES = st.recursive(
    st.sampled_from(["a", "b", "é", "[a-c]", "[^a]", "\\d", "[0-9A-Za-z_]", ".", "\\.", "xyz", "\\n", "/", '"']),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])),
    ),
    max_leaves=6,
)
