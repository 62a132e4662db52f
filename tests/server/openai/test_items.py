"""Items of `input` -> messages: what was one turn of the assistant is one message."""

from __future__ import annotations

from typing import Any

from lora_serve.server.anthropic import serving
from lora_serve.server.openai.responses.serving import messages_of

THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
ASKED = {"role": "user", "content": "Rain?"}


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "rain", "arguments": "{}"}


def in_chat(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "rain", "arguments": "{}"}}


def test_reasoning_text_and_calls_are_one_message() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "no"}]}
    assert messages_of([ASKED, THOUGHT, SAID, call(1), call(2), output], "Be short.") == [
        {"role": "system", "content": "Be short."},
        ASKED,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [in_chat(1), in_chat(2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "no"}]},
    ]


def test_a_text_after_a_call_is_the_next_message() -> None:
    found = messages_of([call(1), SAID, SAID], None)
    assert [set(message) for message in found] == [{"role", "content", "tool_calls"}, *[{"role", "content"}] * 2]
    assert found[0]["content"] is None


def test_reasoning_that_led_to_nothing_is_left_out() -> None:
    assert messages_of([ASKED, THOUGHT], None) == [ASKED]


def test_blocks_of_a_turn_are_one_message_and_results_come_apart() -> None:
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "rain", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True},
        {"type": "text", "text": "And"},
        {"type": "text", "text": "now?"},
    ]
    assert serving.messages_of(
        [{"role": "assistant", "content": turn}, {"role": "user", "content": results}], None
    ) == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [in_chat(1)]},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: no"},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
    ]
