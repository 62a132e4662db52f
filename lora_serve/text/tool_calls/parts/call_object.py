"""A call written as a JSON object with a name and arguments."""

from __future__ import annotations

from enum import Enum, auto

from lora_serve.text.pieces import Reading, nowhere
from lora_serve.text.tool_calls.parts.json_text import MAX_SHORT, SCALAR, json_nested, short_string, skip_json
from lora_serve.text.tool_calls.parts.reading_parser import ReadingParser

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type", "index")  # keys with short values that may stand before what makes it a call


class Outcome(Enum):
    """The end of reading something that may be a call."""

    COMPLETE = auto()
    BROKEN = auto()  # a call was started, and does not go on as one
    NO_CALL = auto()  # nothing was started, as the text is something else; the reader holds it
    CUT = auto()  # nothing was started; the text ended in the middle of the object, and the reader holds it


class CallObject:
    """The reader of one `{"name": ..., "arguments": {...}}`, keys in any order, "parameters" for "arguments" too.

    The call is started when its name is known and its arguments turn out to be an object. A name alone is a call
    without arguments if a marker stood before it (`is_marked`) or a tool has that name.
    """

    def __init__(self, parser: ReadingParser, *, is_marked: bool, stops: str = "") -> None:
        """`stops`: characters that end the object outside strings, as the format's markers begin with them."""
        self._parser = parser
        self._reader = parser.reader
        self._is_marked = is_marked
        self._stops = stops
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name
        self._is_started = False

    def read(self) -> Reading[Outcome]:
        """Read the object. Text that the reader holds is the call's if one is started."""
        if (yield from self._reader.literal("{")) == "":
            return Outcome.NO_CALL
        is_whole = yield from self._members()
        if self._is_started:
            return Outcome.COMPLETE if is_whole else Outcome.BROKEN
        is_cut = not is_whole and (yield from self._reader.peek()) == ""
        is_sure = self._is_marked or self._name in self._parser.known_names
        if is_sure and self._name is not None and self._early is None and (is_whole or is_cut):
            self._parser.start(self._name)
            if is_whole:
                self._parser.arguments("{}")
            return Outcome.COMPLETE
        return Outcome.CUT if is_cut else Outcome.NO_CALL

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
        return (yield from self._reader.run(SCALAR, nowhere, MAX_SHORT)) > 0

    def _start(self) -> None:
        assert self._name is not None
        self._is_started = True
        self._parser.start(self._name)
        self._parser.arguments("".join(self._early or ()))


def call_list(parser: ReadingParser, *, is_marked: bool) -> Reading[Outcome]:
    """Read calls separated by commas, to the bracket that closes the list; the one that opens it has been read.

    What the reader holds at the end is content, but for `Outcome.COMPLETE`: then it holds nothing.
    """
    reader = parser.reader
    while True:
        yield from reader.spaces()
        outcome = yield from CallObject(parser, is_marked=is_marked).read()
        if outcome is not Outcome.COMPLETE:
            return outcome
        reader.hold()
        yield from reader.spaces()
        separator = yield from reader.literal(",", "]")
        if separator == "]":
            reader.let_go()
            return Outcome.COMPLETE
        if separator == "":
            return Outcome.BROKEN
