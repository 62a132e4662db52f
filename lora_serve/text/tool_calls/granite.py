"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`, in 3.1 `<tool_call>`. Granite 4 writes as hermes.

Source: the chat template of ibm-granite/granite-3.3-8b-instruct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    call_rules,
    lark,
    listed,
    marker,
    named_object,
)
from lora_serve.text.tool_calls.json import CallObject


class Format(ToolCallFormat):
    """A list of JSON objects, or one of them, behind a marker."""

    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    end: ClassVar[str] = ""  # none, which is found wherever a call has ended
    markers = begins

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.begins[0] in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        end = marker(self.end, token_ids) if self.end else ""
        start = f"{marker(self.begins[0], token_ids)} {listed('call', parallel)} {end}"
        return lark(start, call_rules(tools, named_object))

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader

        def calls(_begin: str) -> Reading[CallEnd]:
            yield from reader.spaces()
            if (yield from reader.literal("[")) != "":
                return (yield from answer.call_list(call))
            return (yield from call())

        def call() -> Reading[CallEnd]:
            return CallObject(answer, is_marked=True, stops="<").read()

        return answer.marked_calls(self.begins, calls, lambda: answer.next_begin(self.begins[0], self.end))
