"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11 `[TOOL_CALLS]name{...}`.

Source: mistral-common's instruct tokenizers v3 to v13; the last ones write `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import MAX_SHORT, NAME, Reading, nowhere
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    alternatives,
    call_rules,
    lark,
    listed,
    marker,
    named_object,
    quoted,
)
from lora_serve.text.tool_calls.json import CallObject, json_nested

_BEGIN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Format(ToolCallFormat):
    """Calls after a marker, as a list of objects or each with a marker of its own."""

    markers = (_BEGIN, _CALL_ID, _ARGS)

    @classmethod
    def matches(cls, template: str) -> bool:
        return _BEGIN in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        """Allow the forms of all versions, as a model was trained for one of them."""
        begin, args = marker(_BEGIN, token_ids), marker(_ARGS, token_ids)
        named = alternatives("named", [f"{quoted(tool.name)} ({args})? arguments_{i}" for i, tool in enumerate(tools)])
        in_list = f"in_list: {quoted(' ')}? {listed('call', parallel)}"
        start = f"{begin} in_list | {begin} named" + (f" ({begin} named)*" if parallel else "")
        return lark(start, [in_list, *named, *call_rules(tools, named_object)])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader
        while found := (yield from reader.until((_BEGIN,), answer.content)):
            reader.hold(found)
            yield from reader.spaces()
            if (yield from reader.peek()) == "{":
                end = yield from CallObject(answer, is_marked=True).read()
            elif (yield from reader.literal("[")) != "":
                end = yield from answer.call_list(lambda: CallObject(answer, is_marked=True).read())
            else:
                end = yield from self._named_call(answer)
            if end is CallEnd.CUT:
                return
            answer.release()

    def _named_call(self, answer: ToolCallParser) -> Reading[CallEnd]:
        reader = answer.reader
        name = yield from reader.word(NAME, MAX_SHORT)
        yield from reader.spaces()
        mark = yield from reader.literal(_CALL_ID, _ARGS)
        if mark == _CALL_ID:
            yield from reader.run(NAME, nowhere, MAX_SHORT)
            yield from reader.literal(_ARGS)
        yield from reader.spaces()
        character = yield from reader.peek()
        if character == "" and name:
            return CallEnd.CUT
        if character != "{" or not name:
            return CallEnd.NO_CALL
        answer.start(name)
        is_whole = yield from json_nested(reader, answer.arguments)
        return CallEnd.COMPLETE if is_whole else CallEnd.BROKEN
