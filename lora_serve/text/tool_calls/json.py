"""Plain JSON: the whole answer is `{"name": ..., "arguments": {...}}` or a list of such objects.

Other formats write such objects, too. JSON is read in pieces and passed on exactly as it was written, whether or not it
is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from lora_serve.text.pieces import CLOSED_BY, MAX_SHORT, Reader, Reading, Sink, nowhere
from lora_serve.text.tool_calls.base import (
    CallEnd,
    Tool,
    ToolCallFormat,
    ToolCallParser,
    call_rules,
    lark,
    listed,
    named_object,
)

_PLAIN = re.compile(r'[^"\\]+')
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)++', re.DOTALL)  # whole escapes too, as far as they are there
_SCALAR = re.compile(r"[^\s,:{}\[\]\"'<]+")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type", "index")  # keys with short values that may stand before what makes it a call


class Format(ToolCallFormat):
    """Objects without a marker: the answer's first characters decide. No template says so; the format is asked for."""

    @classmethod
    def matches(cls, template: str) -> bool:
        return False

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int]) -> str:
        return lark(listed("call", parallel) if parallel else "call", call_rules(tools, named_object))

    def read(self, answer: ToolCallParser) -> Reading[None]:
        answer.reader.hold()
        yield from answer.reader.spaces()
        if (yield from answer.reader.literal("[")) == "":
            yield from CallObject(answer, is_marked=False).read()
        else:
            yield from answer.call_list(lambda: CallObject(answer, is_marked=False).read())
        yield from answer.rest_is_content()


class CallObject:
    """The reader of one `{"name": ..., "arguments": {...}}`, keys in any order, "parameters" for "arguments" too.

    The call is started when its name is known and its arguments turn out to be an object. A name alone is a call
    without arguments if a marker stood before it (`is_marked`) or a tool has that name.
    """

    def __init__(self, parser: ToolCallParser, *, is_marked: bool, stops: str = "") -> None:
        """`stops`: characters that end the object outside strings, as the format's markers begin with them."""
        self._parser = parser
        self._reader = parser.reader
        self._is_marked = is_marked
        self._stops = stops
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name
        self._is_started = False

    def read(self) -> Reading[CallEnd]:
        """Read the object. Text that the reader holds is the call's if one is started."""
        if (yield from self._reader.literal("{")) == "":
            return CallEnd.NO_CALL
        is_whole = yield from self._members()
        if self._is_started:
            return CallEnd.COMPLETE if is_whole else CallEnd.BROKEN
        is_cut = not is_whole and (yield from self._reader.peek()) == ""
        is_sure = self._is_marked or self._name in self._parser.tools
        if is_sure and self._name is not None and self._early is None and (is_whole or is_cut):
            self._parser.start(self._name)
            if is_whole:
                self._parser.arguments("{}")
            return CallEnd.COMPLETE
        return CallEnd.CUT if is_cut else CallEnd.NO_CALL

    def _members(self) -> Reading[bool]:
        reader = self._reader
        while True:
            yield from reader.spaces()
            key = yield from short_string(reader)
            if key is None:
                return False
            yield from reader.spaces()
            if (yield from reader.literal(":")) == "":
                return False
            yield from reader.spaces()
            if not (yield from self._value(key)):
                return False
            yield from reader.spaces()
            if (end := (yield from reader.literal(",", "}"))) != ",":
                return end == "}"

    def _value(self, key: str) -> Reading[bool]:
        reader = self._reader
        if self._is_started:
            return (yield from skip_json(reader, self._stops))
        if key == "name" and self._name is None:
            self._name = yield from short_string(reader)
            if self._name and self._early is not None:
                self._start()
            return bool(self._name)
        if key in _ARGUMENTS and self._early is None:
            if (yield from reader.peek()) != "{":
                return False
            if self._name is not None:
                self._start()
                return (yield from json_nested(reader, self._parser.arguments, self._stops))
            self._early = []
            return (yield from json_nested(reader, self._early.append, self._stops))
        if key in _BESIDE:
            return (yield from self._short_value())
        return False

    def _short_value(self) -> Reading[bool]:
        if (yield from self._reader.peek()) == '"':
            return (yield from short_string(self._reader)) is not None
        return (yield from self._reader.run(_SCALAR, nowhere, MAX_SHORT)) > 0

    def _start(self) -> None:
        assert self._name is not None
        self._is_started = True
        self._parser.start(self._name)
        self._parser.arguments("".join(self._early or ()))


def json_string(reader: Reader, sink: Sink) -> Reading[bool]:
    """Read a string, quotes included, that begins here; False if the text ends before it does."""
    sink(reader.take())
    while True:
        yield from reader.run(_IN_STRING, sink)
        character = yield from reader.peek()
        if character == "":
            return False
        sink(reader.take())
        if character == '"':
            return True
        if (yield from reader.peek()) != "":
            sink(reader.take())


def short_string(reader: Reader) -> Reading[str | None]:
    """Read a string of at most `MAX_SHORT` characters; None if there is none, what was looked at being read."""
    if (yield from reader.peek()) != '"':
        return None
    parts = [reader.take()]
    length = 0
    while True:
        length += yield from reader.run(_PLAIN, parts.append, MAX_SHORT + 1 - length)
        character = yield from reader.peek()
        if character == "" or length > MAX_SHORT:
            return None
        parts.append(reader.take())
        if character == '"':
            break
        if (yield from reader.peek()) == "":
            return None
        parts.append(reader.take())
        length += 2
    try:
        value = json.loads("".join(parts), strict=False)
        value.encode()  # a lone surrogate is no text
    except ValueError:
        return None
    return str(value)


def json_nested(reader: Reader, sink: Sink, stops: str = "") -> Reading[bool]:
    """Read an object or array that begins here, to the bracket that closes it.

    False if the text ends first, or if a wrong bracket or, outside strings, a character of `stops` comes, which stays
    unread.
    """
    plain = re.compile(rf'[^"{{}}\[\]{re.escape(stops)}]+')
    opened = [reader.take()]
    sink(opened[0])
    while opened:
        yield from reader.run(plain, sink)
        character = yield from reader.peek()
        if character == "" or character in stops:
            return False
        if character == '"':
            if not (yield from json_string(reader, sink)):
                return False
        elif character in CLOSED_BY:
            opened.append(character)
            sink(reader.take())
        elif character == CLOSED_BY[opened[-1]]:
            opened.pop()
            sink(reader.take())
        else:
            return False
    return True


def skip_json(reader: Reader, stops: str = "") -> Reading[bool]:
    """Read a value of any kind and drop it; False if there is none or it breaks off."""
    character = yield from reader.peek()
    if character == '"':
        return (yield from json_string(reader, nowhere))
    if character in ("{", "["):
        return (yield from json_nested(reader, nowhere, stops))
    return (yield from reader.run(_SCALAR, nowhere)) > 0
