"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block per call.

Source: NousResearch/Hermes-Function-Calling; the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading, nowhere
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import CallObject, Outcome
from lora_serve.text.tool_calls.parts.lark import call_rules, lark, marker, named_object, quoted
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHERS = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM write something else between the same markers


class Format(ToolCallFormat):
    """Blocks of JSON between markers, in any text."""

    markers = (_BEGIN, _END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return _BEGIN in template and _END in template and not any(other in template for other in _OTHERS)

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        begin, end = marker(_BEGIN, token_ids), marker(_END, token_ids)
        newline = quoted("\n")
        block = f"block: {begin} {newline} call {newline} {end}"
        return lark(f"block ({newline} block)*" if parallel else "block", [block, *call_rules(tools, named_object)])


class _Parser(ReadingParser):
    def read(self) -> Reading[None]:
        reader = self.reader
        found = yield from reader.until((_BEGIN,), self.content)
        while found:
            reader.hold(found)
            yield from reader.spaces()
            outcome = yield from CallObject(self, is_marked=True, stops="<").read()
            if outcome is Outcome.CUT:
                return
            if outcome is Outcome.NO_CALL:
                self.release()
                found = yield from reader.until((_BEGIN,), self.content)
                continue
            found = yield from reader.until((_END, _BEGIN), nowhere)
            if found == _END:
                found = yield from reader.until((_BEGIN,), self.content)
