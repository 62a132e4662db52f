"""Gemma's calls: `call:name{key:value,...}` between markers, unquoted keys, and a marker as the quote of strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lora_serve.text.pieces import Reader, Reading, Sink, nowhere
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.gemma_grammar import GemmaRules
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT
from lora_serve.text.tool_calls.parts.lark import lark, marker
from lora_serve.text.tool_calls.parts.literals import Literals, inner_json, number_json
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^\s:,{}\[\]<]+")


class GemmaFormat(ToolCallFormat):
    """Format of markers `begin` and `end` around a call and `quote` around a string."""

    begin: ClassVar[str]
    end: ClassVar[str]
    quote: ClassVar[str]

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.begin in template

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools, self)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = GemmaRules(self.quote, marker(self.quote, token_ids))
        calls = [rules.call(tool) for tool in tools]
        block = f"block: {marker(self.begin, token_ids)} ({' | '.join(calls)}) {marker(self.end, token_ids)}"
        return lark("block+" if parallel else "block", [block, *rules.rules])


class GemmaLiterals(Literals):
    """Reader of strings between markers, numbers, true, false and null; another word is taken as a string."""

    def __init__(self, reader: Reader, sink: Sink, quote: str) -> None:
        super().__init__(reader, sink)
        self._quote = quote

    def scalar(self, text: str) -> str | None:
        if text in ("true", "false", "null") or number_json(text):
            return text
        return json.dumps(text, ensure_ascii=False) if text else None

    def key(self) -> Reading[bool]:
        parts: list[str] = []
        yield from self.reader.run(_KEY, parts.append, MAX_SHORT)
        if not parts:
            return bool((yield from self.string()))
        if (yield from self.reader.peek()) == "":
            return False
        self.sink(f'"{inner_json("".join(parts))}"')
        return True

    def string(self) -> Reading[bool | None]:
        if (yield from self.reader.literal(self._quote)) == "":
            return None
        self.sink('"')
        if (yield from self.reader.until((self._quote,), self._inner)) == "":
            return False
        self.sink('"')
        return True

    def _inner(self, piece: str) -> None:
        if not self.reader.is_ended:  # else it is the beginning of a marker that was cut
            self.sink(inner_json(piece))


class _Parser(ReadingParser):
    def __init__(self, tools: Sequence[Tool], form: GemmaFormat) -> None:
        super().__init__(tools)
        self._form = form

    def read(self) -> Reading[None]:
        reader, begin, end = self.reader, self._form.begin, self._form.end
        found = yield from reader.until((begin,), self.content)
        while found:
            reader.hold(found)
            if not (yield from self._call()):
                if (yield from reader.peek()) == "":
                    return
                self.release()
                found = yield from reader.until((begin,), self.content)
                continue
            found = yield from reader.until((end, begin), nowhere)
            if found == end:
                found = yield from reader.until((begin,), self.content)

    def _call(self) -> Reading[bool]:
        """Read a call as far as it is one; False if it is none."""
        reader = self.reader
        yield from reader.spaces()
        if (yield from reader.literal("call:")) == "":
            return False
        name: list[str] = []
        yield from reader.run(_NAME, name.append, MAX_SHORT)
        if not name or (yield from reader.peek()) != "{":
            return False
        self.start("".join(name))
        yield from GemmaLiterals(reader, self.arguments, self._form.quote).value()
        return True
