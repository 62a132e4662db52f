"""Pythonic: `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 and ToolACE write calls; `<|python_start|>` may stand before it.

Source: the prompt format of Llama 3.2 (github.com/meta-llama/llama-models).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import MAX_SHORT, NAME, Reading, inner_json
from lora_serve.text.python_literals import PythonLiterals
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    alternatives,
    lark,
    listed,
    members_of,
    quoted,
    sequence,
    value_of,
)

_START, _END = "<|python_start|>", "<|python_end|>"


class Format(ToolCallFormat):
    """A list of Python calls with named literals, at the answer's beginning or after a marker."""

    markers = (_START, _END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[func_name1(" in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        calls = alternatives("call", [_call_rule(number, tool) for number, tool in enumerate(tools)])
        rules = [rule for number, tool in enumerate(tools) for rule in _argument_rules(number, tool)]
        return lark(listed("call", parallel), [*calls, *rules])

    def read(self, answer: ToolCallParser) -> Reading[None]:
        reader = answer.reader
        reader.hold()
        yield from reader.spaces()
        tag = yield from reader.literal(_START)
        while True:
            yield from reader.spaces()
            end = CallEnd.NO_CALL
            if (yield from reader.literal("[")) != "":
                end = yield from answer.call_list(lambda: _Call(answer).read())
            if end is CallEnd.CUT and tag:
                return
            if end is CallEnd.COMPLETE:
                reader.hold()
                yield from reader.spaces()
                if (yield from reader.literal(_END)) != "":
                    reader.let_go()
            answer.release()
            tag = yield from reader.until((_START,), answer.content)
            if not tag:
                return
            reader.hold(tag)


def _call_rule(number: int, tool: Tool) -> str:
    return f"{quoted(f'{tool.name}(')} arguments_{number} {quoted(')')}"


def _argument_rules(number: int, tool: Tool) -> list[str]:
    pairs, rules = [], []
    around = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    members = members_of(tool.parameters, f"Parameters of tool {tool.name!r}")
    for place, (name, (schema, is_required)) in enumerate(members.items()):
        if not re.fullmatch(r"\w+", name):
            raise InvalidRequestError(f"Tool {tool.name!r}: {name!r} cannot be the name of a parameter", param="tools")
        rule = f"argument_{number}_{place}"
        whole = {**schema, **around} if isinstance(schema, Mapping) else {}
        rules += [f"{rule}: {quoted(f'{name}=')} {rule}_value", f"{rule}_value: {value_of(whole)}"]
        pairs.append((rule, is_required))
    return [*sequence(f"arguments_{number}", pairs, quoted(", ")), *rules]


class _Call:
    """A call that is started when the first text of its arguments is passed on."""

    def __init__(self, answer: ToolCallParser) -> None:
        self._answer = answer
        self._reader = answer.reader
        self._name = ""
        self._is_started = False
        self._num_arguments = 0
        self._waiting = ""  # JSON that goes before the next value

    def read(self) -> Reading[CallEnd]:
        """Read the call. It is known to be one when its first argument's value begins, or when there is none."""
        reader = self._reader
        name = yield from reader.word(NAME, MAX_SHORT)
        yield from reader.spaces()
        if not name or (yield from reader.literal("(")) == "":
            return (yield from self._undecided())
        self._name = name
        yield from reader.spaces()
        while (yield from reader.literal(")")) == "":
            if not (yield from self._argument()):
                return CallEnd.BROKEN if self._is_started else (yield from self._undecided())
        self._pass_on("}" if self._num_arguments else "{}")
        return CallEnd.COMPLETE

    def _argument(self) -> Reading[bool]:
        """Read `key=value` and the comma behind it. Nothing is passed on before the value begins."""
        reader = self._reader
        key = yield from reader.word(NAME, MAX_SHORT)
        yield from reader.spaces()
        if not key or (yield from reader.literal("=")) == "":
            return False
        yield from reader.spaces()
        self._waiting = f'{", " if self._num_arguments else "{"}"{inner_json(key)}": '
        self._num_arguments += 1
        if not (yield from PythonLiterals(reader, self._pass_on).value()):
            return False
        yield from reader.spaces()
        if (yield from reader.literal(",")) != "":
            yield from reader.spaces()
            return True
        return (yield from reader.peek()) == ")"

    def _pass_on(self, text: str) -> None:
        if not self._is_started:
            self._answer.start(self._name)
            self._is_started = True
        self._answer.arguments(self._waiting + text)
        self._waiting = ""

    def _undecided(self) -> Reading[CallEnd]:
        if (yield from self._reader.peek()) != "":
            return CallEnd.NO_CALL
        if self._name not in self._answer.tools:
            return CallEnd.CUT
        self._answer.start(self._name)
        return CallEnd.BROKEN
