"""Llama 3 and 4: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, several separated by `;`.

Source: the prompt format of Llama 3.1 (github.com/meta-llama/llama-models) and the chat templates made after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import CallObject, Outcome
from lora_serve.text.tool_calls.parts.lark import call_rules, lark, named_object, quoted
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_TAG = "<|python_tag|>"
_KEY = re.compile(r"""\\?"parameters\\?": """)
_HEADERS = ("<|start_header_id|>", "<|header_start|>")


class Format(ToolCallFormat):
    """Objects at the answer's beginning, or after the tag, wherever it stands."""

    markers = (_TAG,)

    @classmethod
    def matches(cls, template: str) -> bool:
        return any(header in template for header in _HEADERS) and _KEY.search(template) is not None

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = call_rules(tools, lambda tool, arguments: named_object(tool, arguments, key="parameters"))
        return lark(f"call ({quoted('; ')} call)*" if parallel else "call", rules)


class _Parser(ReadingParser):
    def read(self) -> Reading[None]:
        reader = self.reader
        reader.hold()
        yield from reader.spaces()
        tag = yield from reader.literal(_TAG)
        while True:
            yield from reader.spaces()
            outcome = yield from CallObject(self, is_marked=bool(tag)).read()
            if outcome is Outcome.CUT and tag:
                return
            if outcome is Outcome.COMPLETE:
                reader.hold()
                yield from reader.spaces()
                yield from reader.literal(";")
                yield from reader.spaces()
                tag = yield from reader.literal(_TAG)
                continue
            self.release()
            tag = yield from reader.until((_TAG,), self.content)
            if not tag:
                return
            reader.hold(tag)
