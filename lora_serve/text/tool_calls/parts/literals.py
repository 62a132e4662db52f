"""Values that are not JSON, turned into JSON text piece by piece as they are read."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from enum import Enum, auto

from lora_serve.text.pieces import Reader, Reading, Sink
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT

_CLOSED_BY = {"{": "}", "[": "]"}
_SCALAR = re.compile(r"[^\s,:=()\[\]{}<>\"'|\\]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def inner_json(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def number_json(text: str) -> str | None:
    """The text of a number if it is one in JSON, too."""
    return text if _NUMBER.fullmatch(text) else None


class _Step(Enum):
    VALUE = auto()  # the next value begins here
    OUT = auto()  # a value has ended
    BROKEN = auto()


class Literals(ABC):
    """The reader of values of one notation, with lists in brackets and objects in braces. `sink` gets the JSON text,
    spaced as Python's json.dumps does; nothing if no value begins.
    """

    def __init__(self, reader: Reader, sink: Sink) -> None:
        self.reader = reader
        self.sink = sink

    @abstractmethod
    def string(self) -> Reading[bool | None]:
        """Read a string; False if it breaks off, None if none begins here."""

    @abstractmethod
    def scalar(self, text: str) -> str | None:
        """The JSON text of a value that is no string; None if it is no value."""

    @abstractmethod
    def key(self) -> Reading[bool]:
        """Read an object's key and pass it on as a JSON string; False if there is none or it breaks off."""

    def value(self) -> Reading[bool]:
        """Read one value; False if there is none or it breaks off."""
        closing: list[str] = []
        while True:
            opened = yield from self.reader.literal(*_CLOSED_BY)
            if opened:
                self.sink(opened)
                closing.append(_CLOSED_BY[opened])
                step = yield from self._next_member(closing, is_first=True)
            else:
                step = _Step.OUT if (yield from self._single()) else _Step.BROKEN
            while step is _Step.OUT and closing:
                step = yield from self._next_member(closing, is_first=False)
            if step is not _Step.VALUE:
                return step is _Step.OUT

    def _single(self) -> Reading[bool]:
        is_string = yield from self.string()
        if is_string is not None:
            return is_string
        parts: list[str] = []
        yield from self.reader.run(_SCALAR, parts.append, MAX_SHORT)
        if (yield from self.reader.peek()) == "":
            return False  # it may go on
        text = self.scalar("".join(parts))
        if text is not None:
            self.sink(text)
        return text is not None

    def _next_member(self, closing: list[str], *, is_first: bool) -> Reading[_Step]:
        """Read to the next value of the innermost list or object, or past its end."""
        reader = self.reader
        yield from reader.spaces()
        if not is_first and (yield from reader.literal(",")) != "":
            yield from reader.spaces()
        elif not is_first and (yield from reader.peek()) != closing[-1]:
            return _Step.BROKEN
        if (yield from reader.literal(closing[-1])) != "":
            self.sink(closing.pop())
            return _Step.OUT
        if (yield from reader.peek()) == "":
            return _Step.BROKEN
        if not is_first:
            self.sink(", ")
        if closing[-1] == "}":
            if not (yield from self.key()):
                return _Step.BROKEN
            yield from reader.spaces()
            if (yield from reader.literal(":")) == "":
                return _Step.BROKEN
            self.sink(": ")
            yield from reader.spaces()
        return _Step.VALUE


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
        parts: list[str] = []
        if letter in "01234567":
            yield from self.reader.run(_OCTAL, parts.append, 3)
            self.sink(inner_json(chr(int("".join(parts), 8))))
            return True
        self.reader.take()
        if letter in _NUM_HEX:
            num_digits = yield from self.reader.run(_HEX, parts.append, _NUM_HEX[letter])
            return num_digits == _NUM_HEX[letter] and self._character(int("".join(parts), 16))
        self.sink(inner_json(_ESCAPES.get(letter, letter if letter in _ITSELF else f"\\{letter}")))
        return True

    def _character(self, number: int) -> bool:
        """Pass a character on; halves of a pair as JSON's escapes, which make one character of two."""
        if number > 0x10FFFF:
            return False
        self.sink(f"\\u{number:04x}" if 0xD800 <= number <= 0xDFFF else inner_json(chr(number)))
        return True
