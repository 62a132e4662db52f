"""Text that comes in pieces, read by generators that pause where the text so far ends.

A reading method is a generator: it yields when it needs more text and returns what it has read. What it decides
depends on characters alone, never on where the text was cut. Unread text is kept no longer than a marker may be, so
that reading is linear in the text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from enum import Enum, auto
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
E = TypeVar("E")
Reading: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

SPACE = re.compile(r"\s+")
NAME = re.compile(r"[\w.\-]+")  # of a function
MAX_SHORT = 256  # characters of a key or of a function's name; OpenAI allows 64
CLOSED_BY = {"{": "}", "[": "]"}


def nowhere(_piece: str) -> None:
    """The sink of text that is dropped."""


class Reader:
    """The text of one answer, of which `append` brings the next piece."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self.is_ended = False
        self._held: list[str] | None = None

    def append(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No further piece will come."""
        self.is_ended = True

    def hold(self, text: str = "") -> None:
        """From now on keep what is taken, after `text`, as it is not known yet what it is."""
        self._held = [text]

    def let_go(self) -> str:
        """The text that was kept; nothing more is kept."""
        held, self._held = self._held or [], None
        return "".join(held)

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        while self._position == len(self._text):
            if self.is_ended:
                return ""
            yield
        return self._text[self._position]

    def take(self, length: int = 1) -> str:
        """Read `length` characters that are there."""
        piece = self._text[self._position : self._position + length]
        self._position += length
        if self._held is not None:
            self._held.append(piece)
        return piece

    def run(self, pattern: re.Pattern[str], sink: Sink, limit: int | None = None) -> Reading[int]:
        """Read a run of characters, at most `limit`, of the set that `pattern` (`[...]+`) repeats; its length."""
        length = 0
        while limit is None or length < limit:
            if (yield from self.peek()) == "":
                break
            end = len(self._text) if limit is None else self._position + limit - length
            match = pattern.match(self._text, self._position, end)
            if match is None:
                break
            length += match.end() - match.start()
            sink(self.take(match.end() - match.start()))
        return length

    def word(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Read such a run and return it."""
        parts: list[str] = []
        yield from self.run(pattern, parts.append, limit)
        return "".join(parts)

    def spaces(self) -> Reading[None]:
        yield from self.run(SPACE, nowhere)

    def literal(self, *texts: str) -> Reading[str]:
        """Read the one of `texts` that comes next, none of which begins another; empty if none does."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._position):
                    return self.take(len(text))
            rest = self._text[self._position : self._position + max(map(len, texts))]
            if self.is_ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def until(self, markers: tuple[str, ...], sink: Sink) -> Reading[str]:
        """Read to the first of `markers` and past it, and give `sink` what stands before; empty at the end."""
        pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        while True:
            match = pattern.search(self._text, self._position)
            end = match.start() if match else len(self._text) - (0 if self.is_ended else self._tail(markers))
            if end > self._position:
                sink(self.take(end - self._position))
            if match:
                return self.take(len(match[0]))
            if self.is_ended:
                return ""
            yield

    def _tail(self, markers: tuple[str, ...]) -> int:
        """The length of the longest end of the unread text with which one of `markers` may begin."""
        longest = min(len(self._text) - self._position, max(map(len, markers), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(marker.startswith(self._text[-length:]) for marker in markers):
                return length
        return 0


class PieceParser(ABC, Generic[E]):
    """The reader of one answer. However its text is cut, the pieces given back join to the same events.

    An event is a frozen dataclass; those that follow one another and differ in their `text` alone are given as one.
    """

    def __init__(self) -> None:
        self.reader = Reader()
        self._events: list[E] = []
        self._reading = self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the whole answer, to its end."""

    def feed(self, text: str) -> list[E]:
        """The events that `text`, the next piece of the answer, makes certain."""
        self.reader.append(text)
        return self._advanced()

    def finish(self) -> list[E]:
        """The events of the text that was held back; the answer has ended. Nothing is fed afterwards."""
        self.reader.end()
        return self._advanced()

    def add(self, event: E) -> None:
        self._events.append(event)

    def _advanced(self) -> list[E]:
        next(self._reading, None)
        events, self._events = self._events, []
        return list(_joined(events))


def _joined(events: list[Any]) -> Iterator[Any]:
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if others:
            yield dataclasses.replace(first, text="".join(event.text for event in (first, *others)))
        else:
            yield first


_LITERAL = re.compile(r"[^\s,:=()\[\]{}<>\"'|\\]+")
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
            opened = yield from self.reader.literal(*CLOSED_BY)
            if opened:
                self.sink(opened)
                closing.append(CLOSED_BY[opened])
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
        word = yield from self.reader.word(_LITERAL, MAX_SHORT)
        if (yield from self.reader.peek()) == "":
            return False  # it may go on
        text = self.scalar(word)
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
