"""GPT-OSS: a message of harmony to `functions.name`, with the arguments as JSON, that ends with `<|call|>`.

`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`; the recipient may stand before the
channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.harmony import (
    AUTHOR,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKERS,
    MESSAGE,
    RECIPIENT,
    START,
    could_be_cut,
    read_header,
)
from lora_serve.text.pieces import Reading, nowhere
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

_PREFIX = "functions."
_CHANNEL = "commentary"
_BEGINS = (START, CHANNEL)


class Format(ToolCallFormat):
    """Messages to tools. All other text is content as it is: `reasoning/openai_gptoss.py` reads its channels before."""

    markers = MARKERS

    @classmethod
    def matches(cls, template: str) -> bool:
        return CALL in template and CHANNEL + _CHANNEL in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        """Allow both places of the recipient. A model for which `<|call|>` ends the turn makes one call, of course."""

        def written(tool: Tool, arguments: str) -> str:
            to = f" {RECIPIENT}{_PREFIX}{tool.name}"
            return f"({channel} {quoted(_CHANNEL + to)} | {quoted(to)} {channel} {quoted(_CHANNEL)}) kind {arguments}"

        channel, end = marker(CHANNEL, token_ids), marker(CALL, token_ids)
        json = f"{quoted(' ')}? {marker(CONSTRAIN, token_ids)} {quoted('json')} | {quoted(' json')}"
        kind = f"kind: ({json}) {marker(MESSAGE, token_ids)}"
        between = f"{end} {marker(START, token_ids)} {quoted(AUTHOR)}"
        return lark(f"{repeated('call', between, parallel)} {end}?", [kind, *call_rules(tools, written)])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader
        is_empty = False  # the last call, which has been read past its end

        def call(begin: str) -> Reading[CallEnd]:
            nonlocal is_empty
            header = yield from read_header(reader, begin)
            if isinstance(header, str):
                is_cut = could_be_cut(header) and (yield from reader.peek()) == ""
                return CallEnd.CUT if is_cut else CallEnd.NO_CALL
            if header.recipient in ("", AUTHOR):
                return CallEnd.NO_CALL
            yield from reader.spaces()
            next_one = yield from reader.peek()
            is_empty = next_one not in ("{", "") and (yield from reader.literal(CALL)) != ""
            if next_one not in ("{", "") and not is_empty:
                return CallEnd.NO_CALL
            answer.start(header.recipient.removeprefix(_PREFIX) or header.recipient)
            if is_empty:
                answer.arguments("{}")
            is_whole = next_one == "{" and (yield from json_nested(reader, answer.arguments, stops="<"))
            return CallEnd.COMPLETE if is_whole or is_empty else CallEnd.BROKEN

        def next_begin() -> Reading[str]:
            found = CALL if is_empty else (yield from reader.until((CALL, END, *_BEGINS), nowhere))
            return found if found in _BEGINS else (yield from reader.until(_BEGINS, answer.content))

        first = yield from reader.literal(f" {RECIPIENT}", RECIPIENT)
        yield from answer.marked_calls(_BEGINS, call, next_begin, first)
