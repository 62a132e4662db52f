"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block per call.

Source: NousResearch/Hermes-Function-Calling; the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    call_rules,
    lark,
    marker,
    named_object,
    quoted,
    repeated,
)
from lora_serve.text.tool_calls.json import CallObject

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHERS = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM write something else between the same markers


class Format(ToolCallFormat):
    """Blocks of JSON between markers, in any text."""

    markers = (_BEGIN, _END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return _BEGIN in template and _END in template and not any(other in template for other in _OTHERS)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        newline = quoted("\n")
        block = f"block: {marker(_BEGIN, token_ids)} {newline} call {newline} {marker(_END, token_ids)}"
        return lark(repeated("block", newline, parallel), [block, *call_rules(tools, named_object)])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        def call(_begin: str) -> Reading[CallEnd]:
            yield from answer.reader.spaces()
            return (yield from CallObject(answer, is_marked=True, stops="<").read())

        return answer.marked_calls((_BEGIN,), call, lambda: answer.next_begin(_BEGIN, _END))
