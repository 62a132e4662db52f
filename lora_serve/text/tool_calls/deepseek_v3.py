"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then a Markdown block of JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import MAX_SHORT, Reading, nowhere
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    call_rules,
    lark,
    marker,
    quoted,
    repeated,
)
from lora_serve.text.tool_calls.json import json_nested

_LINE = re.compile(r"[^\n<{`]+")


class Format(ToolCallFormat):
    """Calls between markers, the arguments in a block that begins with three backticks.

    V3.1 has the same markers; the arguments' JSON may stand right after the separator, as there.
    """

    calls_begin, calls_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - the tokens' own letters
    call_begin, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    separator = "<｜tool▁sep｜>"  # noqa: RUF001
    markers = (calls_begin, calls_end, call_begin, call_end, separator)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.calls_begin in template and "```json" in template

    def named(self, text: str) -> str:
        """The function's name in the text that stands for it."""
        return text

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        def written(tool: Tool, arguments: str) -> str:
            return f"{quoted(f'{tool.name}{chr(10)}```json{chr(10)}')} {arguments} {block_end}"

        block_end = quoted("\n```")
        begin, end = marker(self.calls_begin, token_ids), marker(self.calls_end, token_ids)
        opened, closed = marker(self.call_begin, token_ids), marker(self.call_end, token_ids)
        block = f"block: {opened} {quoted('function')} {marker(self.separator, token_ids)} call {closed}"
        blocks = repeated("block", quoted("\n"), parallel)
        return lark(f"{begin} {blocks} {end}", [block, *call_rules(tools, written)])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        def call(begin: str) -> Reading[CallEnd]:
            if begin == self.calls_begin:
                yield from answer.reader.spaces()
                yield from answer.reader.literal(self.call_begin)
            return (yield from self._read_call(answer))

        return answer.marked_calls((self.calls_begin, self.call_begin), call, lambda: self._next_begin(answer))

    def _next_begin(self, answer: ToolCallParser) -> Reading[str]:
        reader = answer.reader
        found = yield from reader.until((self.call_end, self.calls_end, self.call_begin), nowhere)
        if found == self.call_end:
            reader.hold()
            yield from reader.spaces()
            found = yield from reader.literal(self.call_begin, self.calls_end)
            if found:
                reader.let_go()
            else:
                answer.release()
                found = yield from reader.until((self.calls_begin, self.call_begin, self.calls_end), answer.content)
        if found == self.calls_end:
            found = yield from reader.until((self.calls_begin, self.call_begin), answer.content)
        return found

    def _read_call(self, answer: ToolCallParser) -> Reading[CallEnd]:
        """Read `name, separator, {...}` or `type, separator, name, newline, block of JSON`."""
        reader = answer.reader
        name = yield from reader.word(_LINE, MAX_SHORT)
        has_separator = (yield from reader.literal(self.separator)) != ""
        if has_separator:
            yield from reader.spaces()
            if (yield from reader.peek()) != "{":
                name = yield from reader.word(_LINE, MAX_SHORT)
                yield from reader.spaces()
                yield from reader.literal("```json")
                yield from reader.spaces()
        next_one = yield from reader.peek()
        if not has_separator or next_one != "{" or not name.strip():
            return CallEnd.CUT if next_one == "" else CallEnd.NO_CALL
        answer.start(self.named(name.strip()))
        is_whole = yield from json_nested(reader, answer.arguments, stops="<`")
        return CallEnd.COMPLETE if is_whole else CallEnd.BROKEN
