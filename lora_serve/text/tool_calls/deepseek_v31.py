"""DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.tool_calls.base import Tool, call_rules, lark, marker, quoted
from lora_serve.text.tool_calls.deepseek_v3 import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from lora_serve.text.tool_calls.deepseek_v3 import Format as DeepSeekV3


class Format(DeepSeekV3):
    """Calls between markers, name and arguments on either side of one."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS_BEGIN in template and "```json" not in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        def written(tool: Tool, arguments: str) -> str:
            return f"{quoted(tool.name)} {marker(SEPARATOR, token_ids)} {arguments}"

        block = f"block: {marker(CALL_BEGIN, token_ids)} call {marker(CALL_END, token_ids)}"
        begin, end = marker(CALLS_BEGIN, token_ids), marker(CALLS_END, token_ids)
        return lark(f"{begin} block{'+' if parallel else ''} {end}", [block, *call_rules(tools, written)])
