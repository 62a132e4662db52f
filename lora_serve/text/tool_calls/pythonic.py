"""Pythonic: `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 and ToolACE write calls; `<|python_start|>` may stand before it.

Source: the prompt format of Llama 3.2 (github.com/meta-llama/llama-models).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import Reading
from lora_serve.text.tool_calls.base import Tool, ToolCallFormat, ToolCallParser
from lora_serve.text.tool_calls.parts.call_object import Outcome
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT
from lora_serve.text.tool_calls.parts.lark import lark, members_of, quoted, sequence, value_of
from lora_serve.text.tool_calls.parts.literals import PythonLiterals, inner_json
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]+")


class Format(ToolCallFormat):
    """A list of Python calls with named literals, at the answer's beginning or after a marker."""

    markers = (_START, _END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[func_name1(" in template

    def parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        return _Parser(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            rules += _call_rules(number, tool)
        more = f"({quoted(', ')} call)*" if parallel else ""
        return lark(f"{quoted('[')} call {more} {quoted(']')}", rules)


def _call_rules(number: int, tool: Tool) -> list[str]:
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
    if not pairs:
        return [f"call_{number}: {quoted(f'{tool.name}()')}"]
    call = f"call_{number}: {quoted(f'{tool.name}(')} arguments_{number} {quoted(')')}"
    return [call, *sequence(f"arguments_{number}", pairs, quoted(", ")), *rules]


class _Parser(ReadingParser):
    def read(self) -> Reading[None]:
        reader = self.reader
        reader.hold()
        yield from reader.spaces()
        tag = yield from reader.literal(_START)
        while True:
            yield from reader.spaces()
            outcome = Outcome.NO_CALL
            if (yield from reader.literal("[")) != "":
                outcome = yield from self._list()
            if outcome is Outcome.CUT and tag:
                return
            self.release()
            tag = yield from reader.until((_START,), self.content)
            if not tag:
                return
            reader.hold(tag)

    def _list(self) -> Reading[Outcome]:
        reader = self.reader
        while True:
            yield from reader.spaces()
            outcome = yield from self._call()
            if outcome is not Outcome.COMPLETE:
                return outcome
            reader.hold()
            yield from reader.spaces()
            separator = yield from reader.literal(",", "]")
            if separator == "]":
                reader.hold()
                yield from reader.spaces()
                if (yield from reader.literal(_END)) != "":
                    reader.let_go()
                return Outcome.COMPLETE
            if separator == "":
                return Outcome.BROKEN

    def _call(self) -> Reading[Outcome]:
        """Read one call. It is known to be one when its first argument's value begins, or when there is none."""
        reader = self.reader
        name: list[str] = []
        yield from reader.run(_NAME, name.append, MAX_SHORT)
        yield from reader.spaces()
        if not name or (yield from reader.literal("(")) == "":
            return (yield from self._undecided())
        call = _Call(self, "".join(name))
        yield from reader.spaces()
        while (yield from reader.literal(")")) == "":
            if not (yield from self._argument(call)):
                return Outcome.BROKEN if call.is_started else (yield from self._undecided(call.name))
        call.pass_on("}" if call.num_arguments else "{}")
        return Outcome.COMPLETE

    def _argument(self, call: _Call) -> Reading[bool]:
        """Read `key=value` and the comma behind it."""
        reader = self.reader
        key: list[str] = []
        yield from reader.run(_NAME, key.append, MAX_SHORT)
        yield from reader.spaces()
        if not key or (yield from reader.literal("=")) == "":
            return False
        yield from reader.spaces()
        call.name_argument("".join(key))
        if not (yield from PythonLiterals(reader, call.pass_on).value()):
            return False
        yield from reader.spaces()
        if (yield from reader.literal(",")) != "":
            yield from reader.spaces()
            return True
        return (yield from reader.peek()) == ")"

    def _undecided(self, name: str = "") -> Reading[Outcome]:
        if (yield from self.reader.peek()) != "":
            return Outcome.NO_CALL
        if name not in self.known_names:
            return Outcome.CUT
        self.start(name)
        return Outcome.BROKEN


class _Call:
    """A call that is started when the first text of its arguments is passed on."""

    def __init__(self, parser: ReadingParser, name: str) -> None:
        self.name = name
        self.is_started = False
        self.num_arguments = 0
        self._parser = parser
        self._waiting = ""

    def name_argument(self, key: str) -> None:
        """The next value is that of `key`; nothing is passed on before it begins."""
        self._waiting = f'{", " if self.num_arguments else "{"}"{inner_json(key)}": '
        self.num_arguments += 1

    def pass_on(self, text: str) -> None:
        """The next JSON text of the arguments."""
        if not self.is_started:
            self._parser.start(self.name)
            self.is_started = True
        self._parser.arguments(self._waiting + text)
        self._waiting = ""
