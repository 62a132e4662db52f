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

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - the tokens' own letters
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_LINE = re.compile(r"[^\n<{`]+")


class Format(ToolCallFormat):
    """Calls between markers, the arguments in a block that begins with three backticks.

    V3.1 has the same markers; the arguments' JSON may stand right after the separator, as there.
    """

    markers = MARKERS

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
        blocks = repeated("block", quoted("\n"), parallel)
        return lark(f"{begin} {blocks} {end}", [block, *call_rules(tools, written)])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        def call(begin: str) -> Reading[CallEnd]:
            if begin == CALLS_BEGIN:
                yield from answer.reader.spaces()
                yield from answer.reader.literal(CALL_BEGIN)
            return (yield from _read_call(answer))

        return answer.marked_calls((CALLS_BEGIN, CALL_BEGIN), call, lambda: _next_begin(answer))


def _next_begin(answer: ToolCallParser) -> Reading[str]:
    reader = answer.reader
    found = yield from reader.until((CALL_END, CALLS_END, CALL_BEGIN), nowhere)
    if found == CALL_END:
        reader.hold()
        yield from reader.spaces()
        found = yield from reader.literal(CALL_BEGIN, CALLS_END)
        if found:
            reader.let_go()
        else:
            answer.release()
            found = yield from reader.until((CALLS_BEGIN, CALL_BEGIN, CALLS_END), answer.content)
    if found == CALLS_END:
        found = yield from reader.until((CALLS_BEGIN, CALL_BEGIN), answer.content)
    return found


def _read_call(answer: ToolCallParser) -> Reading[CallEnd]:
    """Read `name, separator, {...}` or `type, separator, name, newline, block of JSON`."""
    reader = answer.reader
    name = yield from reader.word(_LINE, MAX_SHORT)
    has_separator = (yield from reader.literal(SEPARATOR)) != ""
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
    answer.start(name.strip())
    is_whole = yield from json_nested(reader, answer.arguments, stops="<`")
    return CallEnd.COMPLETE if is_whole else CallEnd.BROKEN
