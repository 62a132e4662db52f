"""JSON text read in pieces and passed on exactly as it was written, whether or not it is valid."""

from __future__ import annotations

import json
import re

from lora_serve.text.pieces import Reader, Reading, Sink, nowhere

MAX_SHORT = 256  # characters of a key or of a function's name; OpenAI allows 64
_PLAIN = re.compile(r'[^"\\]+')
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)++', re.DOTALL)  # whole escapes too, as far as they are there
SCALAR = re.compile(r"[^\s,:{}\[\]\"'<]+")
_CLOSED_BY = {"{": "}", "[": "]"}


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
        elif character in _CLOSED_BY:
            opened.append(character)
            sink(reader.take())
        elif character == _CLOSED_BY[opened[-1]]:
            opened.pop()
            sink(reader.take())
        else:
            return False
    return True


def skip_json(reader: Reader, stops: str = "") -> Reading[bool]:
    """Read a value of any kind that nobody wants; False if there is none or it breaks off."""
    character = yield from reader.peek()
    if character == '"':
        return (yield from json_string(reader, nowhere))
    if character in ("{", "["):
        return (yield from json_nested(reader, nowhere, stops))
    return (yield from reader.run(SCALAR, nowhere)) > 0
