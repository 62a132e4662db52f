"""DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.tool_calls.base import Tool, call_rules, lark, marker, quoted
from lora_serve.text.tool_calls.deepseek_v3 import Format as DeepSeekV3


class Format(DeepSeekV3):
    """Calls between markers, name and arguments on either side of one."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.calls_begin in template and "```json" not in template

    def written_name(self, tool: Tool) -> str:
        """The text that stands for a tool's name, in terms of a grammar."""
        return quoted(tool.name)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        def written(tool: Tool, arguments: str) -> str:
            return f"{self.written_name(tool)} {marker(self.separator, token_ids)} {arguments}"

        block = f"block: {marker(self.call_begin, token_ids)} call {marker(self.call_end, token_ids)}"
        begin, end = marker(self.calls_begin, token_ids), marker(self.calls_end, token_ids)
        return lark(f"{begin} block{'+' if parallel else ''} {end}", [block, *call_rules(tools, written)])
