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
QWEN_3_5_CALLS = r"""<think>
I need it.
</think>

<tool_call>
<function=get_weather>
<parameter=city>
12 "Ulm"
on <Donau>
</parameter>
<parameter=days>
2.0
</parameter>
</function>
</tool_call>
<tool_call>
<function=find-route>
<parameter=places>
["Ulm", "\u00e4 \"}]"]
</parameter>
<parameter=options>
{"toll": true,
 "limit": null}
</parameter>
</function>
</tool_call>
<tool_call>
<function=get_weather>
<parameter=days>
many
</parameter>
</function>
</tool_call>"""
GEMMA_CALLS = (
    '<|channel>thought\nHm.<channel|>Two.<|tool_call>call:get_weather{city:<|"|>Ulm "}, {<|"|>,days:2,dry:true}'
    '<tool_call|><|tool_call>call:f{a:[<|"|>x<|"|>,{b:null,c:-1.5e3}],o:{}}<tool_call|>'
)
ANSWERS = [
    ("qwen3", "Hello there."),
    ("qwen3", "<think>\nHm.\n</think>\n\nHello there."),
    ("qwen3", QWEN_CALLS),
    ("qwen3", QWEN_TEXT_AND_CALL),
    ("qwen3_5", "Hello there."),
    ("qwen3_5", QWEN_3_5_CALLS),
    ("qwen3_5", "I look.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ("gemma4", "<|channel>thought\nHm.\n<channel|>Hello there."),
    ("gemma4", GEMMA_CALLS),
]
FORMATS = {"qwen3": ("hermes", "qwen3"), "qwen3_5": ("qwen3_coder", "qwen3"), "gemma4": ("gemma4", "gemma4")}
PROMPTS = {**dict.fromkeys(("qwen3", "qwen3_5"), "<|im_start|>assistant\n"), "gemma4": "<|turn>model\n"}
FUNCTIONS = [
    {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}} for tool in TOOLS
]


@pytest.mark.parametrize(("family", "text"), ANSWERS)
def test_answer_is_read_alike(family: str, text: str) -> None:
    (template,) = (found for kinds, found in _RESPONSE_TEMPLATE_FALLBACKS.items() if family in kinds)
    expected = parse_response(text, template, prefix=PROMPTS[family], tools=FUNCTIONS)
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
