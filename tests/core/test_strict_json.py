"""JSON of users: one reader, without leniencies."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.strict_json import JsonError, parse_json, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES, st.booleans())
def test_what_python_writes_is_read(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert repr(parse_json(text)) == repr(parse_json(text, unique_keys=True)) == repr(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"1 2", "Extra data"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b'"\xff"', "not UTF-8"),
        (b"NaN", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"1e999", "too large a number"),
        (b"1" * 5000, "too many digits"),
        (b'"\\ud83d"', "half of a surrogate pair"),
        (b'{"\\uDC00": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": {"b": 1, "b": 2}}', "a key occurs twice"),
        (b"[[[1]]]", "nested more than 3 deep"),
    ],
)
def test_what_is_no_strict_json_is_refused_in_words(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text, unique_keys=True, max_depth=3)
    assert reason in caught.value.reason
    if "twice" not in reason and "3 deep" not in reason:
        with pytest.raises(JsonError, match=re.escape(str(caught.value))):
            parse_json(text)


def test_keys_that_occur_twice_and_any_depth_are_taken_unless_asked_otherwise() -> None:
    assert parse_json(b'{"a": 1, "a": [[[2]]]}') == {"a": [[[2]]]}


def test_a_file_of_an_adapter_is_an_object_and_named_in_the_refusal() -> None:
    assert parse_object(b'{"r": [1]}', "adapter_config.json", 3) == {"r": [1]}
    for text, reason in (
        (b"[]", "is not a JSON object"),
        (b'{"r": 1, "r": 2}', "is not valid JSON: a key occurs twice"),
    ):
        with pytest.raises(InvalidAdapterError, match=f"adapter_config.json {reason}"):
            parse_object(text, "adapter_config.json")
