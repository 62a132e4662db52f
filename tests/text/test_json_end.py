"""The end of a JSON value is found however its text is cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.server.inference.reading import JsonEnd

TEXTS = st.text(st.sampled_from('"\\\\{}[]a,ö'), max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8
)


@given(st.dictionaries(TEXTS, VALUES) | st.lists(VALUES), st.data())
def test_end_is_the_last_character(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    end = JsonEnd()
    at = 0
    while at < len(text):
        assert not end.is_reached
        size = data.draw(st.integers(1, 5))
        end.feed(text[at : at + size])
        end.feed("")
        at += size
    assert end.is_reached
