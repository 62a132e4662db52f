"""DeepSeek's calls: a name and a JSON text between markers, in the forms of its versions 3 and 3.1."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_serve.text.pieces import Reading, nowhere
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import Outcome
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT, json_nested
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - the tokens' own letters
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_LINE = re.compile(r"[^\n<{`]+")


class DeepSeekFormat(ToolCallFormat):
    """The markers and the parser that both forms share."""

    markers = MARKERS

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return DeepSeekParser(tools)


class DeepSeekParser(ReadingParser):
    """Parser of both forms: after the separator stands the arguments' JSON, or a name and then a block of JSON."""

    def read(self) -> Reading[None]:
        reader = self.reader
        found = yield from reader.until((CALLS_BEGIN, CALL_BEGIN), self.content)
        while found:
            reader.hold(found)
            if found == CALLS_BEGIN:
                yield from reader.spaces()
                yield from reader.literal(CALL_BEGIN)
            outcome = yield from self._call()
            if outcome is Outcome.CUT:
                return
            if outcome is Outcome.NO_CALL:
                self.release()
                found = yield from reader.until((CALLS_BEGIN, CALL_BEGIN), self.content)
                continue
            found = yield from reader.until((CALL_END, CALLS_END, CALL_BEGIN), nowhere)
            if found == CALL_END:
                found = yield from self._after_call()
            if found == CALLS_END:
                found = yield from reader.until((CALLS_BEGIN, CALL_BEGIN), self.content)

    def _after_call(self) -> Reading[str]:
        reader = self.reader
        reader.hold()
        yield from reader.spaces()
        if found := (yield from reader.literal(CALL_BEGIN, CALLS_END)):
            reader.let_go()
            return found
        self.release()
        return (yield from reader.until((CALLS_BEGIN, CALL_BEGIN, CALLS_END), self.content))

    def _call(self) -> Reading[Outcome]:
        """Read `name, separator, {...}` or `type, separator, name, newline, block of JSON`."""
        reader = self.reader
        parts: list[str] = []
        yield from reader.run(_LINE, parts.append, MAX_SHORT)
        if (yield from reader.literal(SEPARATOR)) == "":
            return (yield from self._no_call())
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            parts.clear()
            yield from reader.run(_LINE, parts.append, MAX_SHORT)
            yield from reader.spaces()
            yield from reader.literal("```json")
            yield from reader.spaces()
        name = "".join(parts).strip()
        if (yield from reader.peek()) != "{" or not name:
            return (yield from self._no_call())
        self.start(name)
        is_whole = yield from json_nested(reader, self.arguments, stops="<`")
        return Outcome.COMPLETE if is_whole else Outcome.BROKEN

    def _no_call(self) -> Reading[Outcome]:
        return Outcome.CUT if (yield from self.reader.peek()) == "" else Outcome.NO_CALL
