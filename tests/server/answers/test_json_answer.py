"""Large answers are written in slices, and are the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from lora_serve.server.answers import as_given, compact, spaced, written

LARGE: list[Any] = [
    list(range(10_000)),
    tuple(range(10_000)),
    {"text": '"\\\n\u6f22\U0001f600' * 50_000, "none": None},
    [{"a": [1.5, None, True], "b": "x" * 100} for _ in range(2_000)],
    {str(number): {"logprob": -1.0, "rank": number} for number in range(5_000)},
    {"choices": [{"logprobs": {"tokens": ["a"] * 9_000, "top": [{"a": 1, "b": 2}] * 9_000}}] * 1, "usage": {}},
]
NUMBERS = st.floats(-1e16, 1e16, exclude_min=True, exclude_max=True) | st.floats(-1e-3, 1e-3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class Part(msgspec.Struct, tag_field="type", tag="part"):
    """A part of an answer, as routes have them."""

    value: Any
    rest: list[Any] | msgspec.UnsetType = msgspec.UNSET
    start: int = msgspec.field(name="from", default=0)


def test_large_values_are_written_whole() -> None:
    for value in LARGE:
        expected = json.loads(json.dumps(value))
        parts = list(written(value))
        assert json.loads(b"".join(parts)) == expected
        assert len(parts) > 2
        assert max(map(len, parts)) < 10**6


@given(VALUES)
@example('0.00001 e-5 "\\\\"')
@example(["\ud800", 2**70, 1e-05, 1.5e-07])
def test_any_value_is_written_whole_and_spelled_as_python_does(value: Any) -> None:
    expected = json.dumps(value)
    assert spaced(value).decode() == expected
    assert b"".join(written(json.loads(expected))).decode() == expected


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text()))
def test_a_callers_values_are_spelled_as_python_does(value: list[Any]) -> None:
    assert spaced(as_given(value)).decode() == json.dumps(value)
    assert compact(as_given(value)).decode() == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    halves = [*value, "\ud800"]
    assert spaced(as_given(halves)).decode() == json.dumps(halves)


def test_large_structs_are_written_as_small_ones_are() -> None:
    rows = [Part(number, ["a"] if number % 2 else msgspec.UNSET) for number in range(5_000)]
    whole = Part(rows, start=3)
    assert spaced(Part(["\ud800", as_given(["a"])])).decode() == json.dumps(
        {"type": "part", "value": ["\ud800", ["a"]], "from": 0}
    )
    plain, expected, parts = msgspec.to_builtins(whole), spaced(whole), list(written(whole))
    assert len(parts) > 2
    assert b"".join(parts) == expected
    assert json.loads(expected) == plain


def test_what_is_written_is_let_go() -> None:
    value: dict[str, Any] = {"a": [[number] * 10 for number in range(5_000)], "b": 1}
    held = value["a"]
    for _ in written(value):
        pass
    assert value == {}
    assert set(held) == {None}
