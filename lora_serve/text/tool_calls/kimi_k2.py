"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, counted.

Source: docs/tool_call_guidance.md and the chat template of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import re

from lora_serve.text.tool_calls.base import Tool, quoted
from lora_serve.text.tool_calls.deepseek_v31 import Format as DeepSeekV31

_PREFIX = "functions."
_NUMBER = re.compile(r":[0-9]+$")


class Format(DeepSeekV31):
    """Calls between markers, as DeepSeek's, with ids in place of names."""

    calls_begin, calls_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (calls_begin, calls_end, call_begin, call_end, separator)

    def named(self, text: str) -> str:
        return _NUMBER.sub("", text).removeprefix(_PREFIX) or text

    def written_name(self, tool: Tool) -> str:
        return f"{quoted(f'{_PREFIX}{tool.name}:')} /[0-9]{{1,4}}/"
