"""Llama 3 and 4: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, several separated by `;`.

Source: the prompt format of Llama 3.1 (github.com/meta-llama/llama-models) and the chat templates made after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    call_rules,
    lark,
    named_object,
    quoted,
    repeated,
)
from lora_serve.text.tool_calls.json import CallObject

_TAG = "<|python_tag|>"
_KEY = re.compile(r"""\\?"parameters\\?": """)
_HEADERS = ("<|start_header_id|>", "<|header_start|>")


class Format(ToolCallFormat):
    """Objects at the answer's beginning, or after the tag, wherever it stands."""

    markers = (_TAG,)

    @classmethod
    def matches(cls, template: str) -> bool:
        return any(header in template for header in _HEADERS) and _KEY.search(template) is not None

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = call_rules(tools, lambda tool, arguments: named_object(tool, arguments, key="parameters"))
        return lark(repeated("call", quoted("; "), parallel), rules)

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader
        reader.hold()
        yield from reader.spaces()
        tag = yield from reader.literal(_TAG)
        while True:
            yield from reader.spaces()
            end = yield from CallObject(answer, is_marked=bool(tag)).read()
            if end is CallEnd.CUT and tag:
                return
            if end is CallEnd.COMPLETE:
                reader.hold()
                yield from reader.spaces()
                yield from reader.literal(";")
                yield from reader.spaces()
                tag = yield from reader.literal(_TAG)
                continue
            answer.release()
            tag = yield from reader.until((_TAG,), answer.content)
            if not tag:
                return
            reader.hold(tag)
