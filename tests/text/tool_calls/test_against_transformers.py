"""Answers read as transformers reads them when it serves Qwen and Gemma 4 itself."""

from __future__ import annotations

import json

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from lora_serve.text.reasoning import reasoning_format
from lora_serve.text.reasoning.base import ReasoningText
from lora_serve.text.tool_calls import tool_call_format
from tests.text.tool_calls.calls import TOOLS, parsed

QWEN_CALLS = r"""<think>
I need it.
</think>

<tool_call>
{"name": "get_weather", "arguments": {"city": "Ulm \"}\"", "days": 2}}
</tool_call>
<tool_call>
{"arguments": {"a": [1, {"b": null}]}, "name": "f"}
</tool_call>"""
QWEN_TEXT_AND_CALL = 'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
GEMMA_CALLS = (
    '<|channel>thought\nHm.<channel|>Two.<|tool_call>call:get_weather{city:<|"|>Ulm "}, {<|"|>,days:2,dry:true}'
    '<tool_call|><|tool_call>call:f{a:[<|"|>x<|"|>,{b:null,c:-1.5e3}],o:{}}<tool_call|>'
)
ANSWERS = [
    ("qwen3", "Hello there."),
    ("qwen3", "<think>\nHm.\n</think>\n\nHello there."),
    ("qwen3", QWEN_CALLS),
    ("qwen3", QWEN_TEXT_AND_CALL),
    ("gemma4", "<|channel>thought\nHm.\n<channel|>Hello there."),
    ("gemma4", GEMMA_CALLS),
]
FORMATS = {"qwen3": ("hermes", "qwen3"), "gemma4": ("gemma4", "gemma4")}
PROMPTS = {"qwen3": "<|im_start|>assistant\n", "gemma4": "<|turn>model\n"}


@pytest.mark.parametrize(("family", "text"), ANSWERS)
def test_answer_is_read_alike(family: str, text: str) -> None:
    (template,) = (found for kinds, found in _RESPONSE_TEMPLATE_FALLBACKS.items() if family in kinds)
    expected = parse_response(text, template, prefix=PROMPTS[family])
    calls, thoughts = FORMATS[family]
    reasoning = reasoning_format(thoughts).parser(starts_inside=False)
    events = [*(event for letter in text for event in reasoning.feed(letter)), *reasoning.finish()]
    thought = "".join(event.text for event in events if isinstance(event, ReasoningText))
    answer = parsed(
        tool_call_format(calls).parser(TOOLS), [event.text for event in events if not isinstance(event, ReasoningText)]
    )
    assert thought.strip() == expected.get("reasoning_content", "").strip()
    assert answer.content.strip() == expected.get("content", "").strip()
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in expected.get("tool_calls", [])
    ]
