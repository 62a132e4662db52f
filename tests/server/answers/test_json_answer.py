"""Large answers are written in slices, and are the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.server.answers.json_answer import written

LARGE: list[Any] = [
    list(range(10_000)),
    tuple(range(10_000)),
    {"text": '"\\\n\u6f22\U0001f600' * 50_000, "none": None},
    [{"a": [1.5, None, True], "b": "x" * 100} for _ in range(2_000)],
    {str(number): {"logprob": -1.0, "rank": number} for number in range(5_000)},
    {"choices": [{"logprobs": {"tokens": ["a"] * 9_000, "top": [{"a": 1, "b": 2}] * 9_000}}] * 1, "usage": {}},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_large_values_are_written_whole() -> None:
    for value in LARGE:
        expected = json.loads(json.dumps(value))
        parts = list(written(value))
        assert json.loads("".join(parts)) == expected
        assert len(parts) > 2
        assert max(map(len, parts)) < 10**6


@given(VALUES)
def test_any_value_is_written_whole(value: Any) -> None:
    expected = json.loads(json.dumps(value))
    assert json.loads("".join(written(value))) == expected


def test_what_is_written_is_let_go() -> None:
    value: dict[str, Any] = {"a": [[number] * 10 for number in range(5_000)], "b": 1}
    held = value["a"]
    for _ in written(value):
        pass
    assert value == {}
    assert set(held) == {None}
