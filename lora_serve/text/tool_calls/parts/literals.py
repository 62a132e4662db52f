"""Values that are not JSON, turned into JSON text piece by piece as they are read."""

from __future__ import annotations

import json
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
