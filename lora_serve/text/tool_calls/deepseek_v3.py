"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then a Markdown block of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.tool_calls.base import Tool
from lora_serve.text.tool_calls.parts.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    DeepSeekFormat,
)
from lora_serve.text.tool_calls.parts.lark import call_rules, lark, marker, quoted


class Format(DeepSeekFormat):
    """Calls between markers, the arguments in a block that begins with three backticks."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALLS_BEGIN in template and "```json" in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        def written(tool: Tool, arguments: str) -> str:
            return f"{quoted(f'{tool.name}{chr(10)}```json{chr(10)}')} {arguments} {block_end}"

        block_end = quoted("\n```")
        begin, end = marker(CALLS_BEGIN, token_ids), marker(CALLS_END, token_ids)
        opened, closed = marker(CALL_BEGIN, token_ids), marker(CALL_END, token_ids)
        block = f"block: {opened} {quoted('function')} {marker(SEPARATOR, token_ids)} call {closed}"
        newline = quoted("\n")
        blocks = f"block ({newline} block)*" if parallel else "block"
        return lark(f"{begin} {blocks} {end}", [block, *call_rules(tools, written)])
