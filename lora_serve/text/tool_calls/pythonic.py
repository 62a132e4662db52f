"""Pythonic: `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 and ToolACE write calls; `<|python_start|>` may stand before it.

Source: the prompt format of Llama 3.2 (github.com/meta-llama/llama-models).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.pieces import MAX_SHORT, NAME, Literals, Reading, inner_json, number_json
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


_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_ITSELF = "\\'\"/"
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]+")
_WHOLE = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|[0-9][0-9_]*)")
_REAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}


class PythonLiterals(Literals):
    """Reader of strings in either quotes, also triple ones, numbers, True, False, None, lists and dicts."""

    def scalar(self, text: str) -> str | None:
        if text in _WORDS:
            return _WORDS[text]
        if number_json(text):
            return text
        try:
            if _WHOLE.fullmatch(text):
                return str(int(text, 10 if text.lstrip("+-").isdigit() else 0))
            if _REAL.fullmatch(text) and math.isfinite(float(text)):
                return json.dumps(float(text))
        except ValueError:
            return None
        return None

    def key(self) -> Reading[bool]:
        is_string = yield from self.string()
        return bool(is_string)

    def string(self) -> Reading[bool | None]:
        quote = yield from self.reader.peek()
        if quote not in _PLAIN:
            return None
        end = quote
        self.reader.take()
        if (yield from self.reader.peek()) == quote:
            self.reader.take()
            if (yield from self.reader.peek()) != quote:
                self.sink('""')
                return True
            self.reader.take()
            end = quote * 3
        self.sink('"')
        if not (yield from self._to_end(quote, end)):
            return False
        self.sink('"')
        return True

    def _to_end(self, quote: str, end: str) -> Reading[bool]:
        reader = self.reader
        while True:
            yield from reader.run(_PLAIN[quote], lambda piece: self.sink(inner_json(piece)))
            if (yield from reader.peek()) == "":
                return False
            if (yield from reader.literal(end)) != "":
                return True
            if reader.take() == "\\":
                if not (yield from self._escape()):
                    return False
            else:
                self.sink(inner_json(quote))

    def _escape(self) -> Reading[bool]:
        letter = yield from self.reader.peek()
        if letter == "":
            return False
        if letter in "01234567":
            digits = yield from self.reader.word(_OCTAL, 3)
            self.sink(inner_json(chr(int(digits, 8))))
            return True
        self.reader.take()
        if letter in _NUM_HEX:
            digits = yield from self.reader.word(_HEX, _NUM_HEX[letter])
            return len(digits) == _NUM_HEX[letter] and self._character(int(digits, 16))
        self.sink(inner_json(_ESCAPES.get(letter, letter if letter in _ITSELF else f"\\{letter}")))
        return True

    def _character(self, number: int) -> bool:
        """Pass a character on; halves of a pair as JSON's escapes, which make one character of two."""
        if number > 0x10FFFF:
            return False
        self.sink(f"\\u{number:04x}" if 0xD800 <= number <= 0xDFFF else inner_json(chr(number)))
        return True
