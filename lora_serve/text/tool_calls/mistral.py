"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11 `[TOOL_CALLS]name{...}`.

Source: mistral-common's instruct tokenizers v3 to v13; the last ones write `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading, nowhere
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import CallObject, Outcome, call_list
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT, json_nested
from lora_serve.text.tool_calls.parts.lark import call_rules, lark, marker, named_object, quoted
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_BEGIN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-]+")


class Format(ToolCallFormat):
    """Calls after a marker, as a list of objects or each with a marker of its own."""

    markers = (_BEGIN, _CALL_ID, _ARGS)

    @classmethod
    def matches(cls, template: str) -> bool:
        return _BEGIN in template

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        """Allow the forms of all versions, as a model was trained for one of them."""
        begin, args = marker(_BEGIN, token_ids), marker(_ARGS, token_ids)
        objects = call_rules(tools, named_object)
        more = f"({quoted(', ')} call)*" if parallel else ""
        names = [
            f"named_{number}: {quoted(tool.name)} ({args})? arguments_{number}" for number, tool in enumerate(tools)
        ]
        named = f"named: {' | '.join(f'named_{number}' for number in range(len(tools)))}"
        listed = f"listed: {quoted(' ')}? {quoted('[')} call {more} {quoted(']')}"
        start = f"{begin} listed | {begin} named" + (f" ({begin} named)*" if parallel else "")
        return lark(start, [listed, named, *names, *objects])


class _Parser(ReadingParser):
    def read(self) -> Reading[None]:
        reader = self.reader
        while found := (yield from reader.until((_BEGIN,), self.content)):
            reader.hold(found)
            yield from reader.spaces()
            if (yield from reader.peek()) == "{":
                outcome = yield from CallObject(self, is_marked=True).read()
            elif (yield from reader.literal("[")) != "":
                outcome = yield from call_list(self, is_marked=True)
            else:
                outcome = yield from self._named_call()
            if outcome is Outcome.CUT:
                return
            self.release()

    def _named_call(self) -> Reading[Outcome]:
        reader = self.reader
        parts: list[str] = []
        yield from reader.run(_NAME, parts.append, MAX_SHORT)
        yield from reader.spaces()
        mark = yield from reader.literal(_CALL_ID, _ARGS)
        if mark == _CALL_ID:
            yield from reader.run(_NAME, nowhere, MAX_SHORT)
            yield from reader.literal(_ARGS)
        yield from reader.spaces()
        character = yield from reader.peek()
        if character == "" and parts:
            return Outcome.CUT
        if character != "{" or not parts:
            return Outcome.NO_CALL
        self.start("".join(parts))
        is_whole = yield from json_nested(reader, self.arguments)
        return Outcome.COMPLETE if is_whole else Outcome.BROKEN
