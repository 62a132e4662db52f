"""Answers of the kinds that vLLM's tests of its own parsers hold, with what these parsers read in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_serve.text.tool_calls import tool_call_format
from lora_serve.text.tool_calls.base import Tool
from tests.text.tool_calls.calls import parsed

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}}
AREA = {
    "type": "object",
    "properties": {"shape": {"type": "string"}, "size": {"type": "object"}, "precision": {"type": "integer"}},
}
TOOLS = (Tool("get_weather", parameters=CITY), Tool("get_area", parameters=AREA), Tool("get_date"))

QWEN_TYPED = """I compute it.<tool_call>
<function=get_area>
<parameter=shape>
rectangle
</parameter>
<parameter=size>
{"width": 10,
 "height": 20}
</parameter>
<parameter=precision>
2
</parameter>
</function>
</tool_call>"""
QWEN_BARE = """<function=get_weather>
<parameter=city>
Dallas
</parameter>
</function>"""
QWEN_SHORT = "<tool_call><function=get_weather><parameter=city>Ulm</parameter></function></tool_call>"
GLM_INDENTED = """I look. <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Dallas</arg_value>
    <arg_key>unit</arg_key>
    <arg_value>fahrenheit</arg_value>
    </tool_call>
    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>\u5317\u4eac</arg_value>
    </tool_call>"""
GLM_FLAT = (
    '<tool_call>get_area<arg_key>size</arg_key><arg_value>{"a": 1}</arg_value></tool_call>'
    "<tool_call>get_date</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Seattle</parameter></invoke>\n'
    '<invoke name="get_area">\n<parameter name="precision">5</parameter>\n</invoke></minimax:tool_call>'
)
KIMI = (
    "Both. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>"
    '{"city": "<div>Bonn</div>"}<|tool_call_end|><|tool_call_begin|>get_date:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
KIMI_BROKEN = KIMI.replace("}<|tool_call_end|><|tool_call_begin|>get", "<|tool_call_end|><|tool_call_begin|>get")
GRANITE = """<|tool_call|> [
  {"name": "get_weather", "arguments": {"city": "Tokyo"}},
  {"arguments": {"city": "Ky\\u014dto"}, "name": "get_weather"}
]"""
NEMOTRON = """I look.
<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Tokyo", "unit": "celsius"}}, \
{"name": "get_date", "arguments": {}}]</TOOLCALL>"""

ANSWERS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "qwen3_coder",
        QWEN_TYPED,
        "I compute it.",
        [("get_area", {"shape": "rectangle", "size": {"width": 10, "height": 20}, "precision": 2})],
    ),
    ("qwen3_coder", QWEN_BARE, "", [("get_weather", {"city": "Dallas"})]),
    ("qwen3_coder", QWEN_SHORT * 2, "", [("get_weather", {"city": "Ulm"})] * 2),
    (
        "glm45",
        GLM_INDENTED,
        "I look. ",
        [("get_weather", {"city": "Dallas", "unit": "fahrenheit"}), ("get_weather", {"city": "\u5317\u4eac"})],
    ),
    ("glm45", GLM_FLAT, "", [("get_area", {"size": {"a": 1}}), ("get_date", {})]),
    ("minimax_m2", MINIMAX, "", [("get_weather", {"city": "Seattle"}), ("get_area", {"precision": 5})]),
    ("kimi_k2", KIMI, "Both. ", [("get_weather", {"city": "<div>Bonn</div>"}), ("get_date", {})]),
    ("kimi_k2", KIMI_BROKEN, "Both. ", [("get_weather", '{"city": "<div>Bonn</div>"'), ("get_date", {})]),
    ("granite", GRANITE, "", [("get_weather", {"city": "Tokyo"}), ("get_weather", {"city": "Ky\u014dto"})]),
    ("granite", '<tool_call>[{"name": "get_date", "arguments": {}}]', "", [("get_date", {})]),
    (
        "nemotron_json",
        NEMOTRON,
        "I look.\n",
        [("get_weather", {"city": "Tokyo", "unit": "celsius"}), ("get_date", {})],
    ),
    ("nemotron_json", '<TOOLCALL>{"name": "get_date", "arguments": {}}</TOOLCALL>', "", [("get_date", {})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_answer_is_read_as_vllm_reads_it(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    form = tool_call_format(name)
    for pieces in ([text], list(text), [text[at : at + 5] for at in range(0, len(text), 5)]):
        answer = parsed(form.parser(TOOLS), pieces)
        assert answer.content == content
        found = [
            (call.name, call.arguments if isinstance(given, str) else json.loads(call.arguments))
            for call, (_, given) in zip(answer.calls, calls, strict=True)
        ]
        assert found == calls
