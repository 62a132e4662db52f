"""Plain JSON: the whole answer is `{"name": ..., "arguments": {...}}` or a list of such objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import CallObject, call_list
from lora_serve.text.tool_calls.parts.lark import call_rules, lark, named_object, quoted
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser


class Format(ToolCallFormat):
    """Objects without a marker: the answer's first characters decide. No template says so; the format is asked for."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return False

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        start = f"{quoted('[')} call ({quoted(', ')} call)* {quoted(']')}" if parallel else "call"
        return lark(start, call_rules(tools, named_object))


class _Parser(ReadingParser):
    def read(self) -> Reading[None]:
        reader = self.reader
        reader.hold()
        yield from reader.spaces()
        if (yield from reader.literal("[")) == "":
            yield from CallObject(self, is_marked=False).read()
        else:
            yield from call_list(self, is_marked=False)
        yield from self.rest_is_content()
