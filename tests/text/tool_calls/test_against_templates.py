"""Calls that the chat templates of models write are read back as they were."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.text.chat import parse_messages, render_chat
from lora_serve.text.tokenizer import TextModel
from lora_serve.text.tool_calls.base import Tool
from tests.text.call_templates import TEMPLATES
from tests.text.tool_calls.calls import parsed, pieces_of
from tests.text.tool_templates import tool_model

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOL = Tool("f", parameters={"type": "object", "properties": PROPERTIES})
FUNCTION = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": dict(TOOL.parameters)}}
USER = {"role": "user", "content": "How?"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e30, 1e30) | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS | st.sampled_from(["5", "null", "\n{}\n", "<b>\n</b>", "</function>", "</param", "</tool_call>"]),
        "count": st.integers(-(2**60), 2**60),
        "ratio": st.floats(-1e30, 1e30),
        "flag": st.booleans(),
        "list": st.lists(VALUES, max_size=3),
        "more": st.dictionaries(TEXTS, VALUES, max_size=3),
        "maybe": st.none() | TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
    },
)


@cache
def model(name: str) -> TextModel:
    return tool_model(name)


def written(name: str, calls: list[dict[str, Any]]) -> str:
    """An answer that makes the calls, as the template of a family writes it."""
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
        for number, arguments in enumerate(calls)
    ]
    turns = parse_messages([USER, {"role": "assistant", "content": None, "tool_calls": made}])
    return render_chat(model(name), turns, tools=[FUNCTION], add_generation_prompt=False).text.rpartition("How?")[2]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 10**6), max_size=8))
def test_calls_are_read_back(name: str, calls: list[dict[str, Any]], cuts: list[int]) -> None:
    form = model(name).template.call_format
    assert form is not None
    text = written(name, calls)
    answer = parsed(form.parser([TOOL]), [text])
    assert [call.name for call in answer.calls] == ["f"] * len(calls)
    assert [json.loads(call.arguments) for call in answer.calls] == calls
    assert parsed(form.parser([TOOL]), pieces_of(text, cuts)) == answer
