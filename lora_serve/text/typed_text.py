"""Values that are written as bare text, typed by a JSON schema: a string is the text itself, another value its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_serve.text.pieces import MAX_SHORT, Reader, Reading, Sink, inner_json, nowhere
from lora_serve.text.tool_calls.pythonic import PythonLiterals

KINDS = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
TEXT = frozenset(("string",))
_OF_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_OF_LETTERS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORD = re.compile(r"[\w+.\-]+")  # what numbers, true and None are made of
_WHOLE = re.compile(r"-?[0-9]+(\.0+)?")


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema `root` that a `$ref` names; None if there is none."""
    found: Any = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of the values that a schema within `root` allows; `KINDS` if it does not tell them."""
    waiting, followed, found = [schema], set[str](), set[str]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            return KINDS
        types = [one["type"]] if isinstance(one.get("type"), str) else one.get("type")
        options = one.get("anyOf") or one.get("oneOf")
        if "$ref" in one:
            reference = str(one["$ref"])
            waiting += [] if reference in followed else [referred(reference, root)]
            followed.add(reference)
        elif isinstance(types, list) and all(isinstance(name, str) and name in KINDS for name in types):
            found.update(types)
        elif "const" in one or isinstance(one.get("enum"), list):
            values = [one["const"]] if "const" in one else one["enum"]
            found.update(_OF_TYPES.get(type(value), "null") for value in values)
        elif isinstance(options, list):
            waiting += options
        elif isinstance(one.get("allOf"), list):
            waiting += one["allOf"][:1]  # the value obeys each of them
        else:
            return KINDS
    return frozenset(found) or KINDS


def value_in(text: str, kinds: frozenset[str]) -> str | None:
    """The JSON text of the value of one of `kinds` that `text` writes as JSON or as Python; None if it is a string.

    A string in quotes is one where any kind may be. Where no string may be, null may.
    """
    parts: list[str] = []
    reader = Reader()
    reader.append(f"{text.strip()}\n")
    reader.end()
    next(_read_whole(reader, parts), None)
    value = "".join(parts)
    kind = _OF_LETTERS.get(value[:1], "number")
    is_whole = kind == "number" and "integer" in kinds and _WHOLE.fullmatch(value)
    is_kind = kinds == KINDS if kind == "string" else kind in kinds or (kind == "null" and "string" not in kinds)
    return value if value and (is_kind or is_whole) else None


def _read_whole(reader: Reader, parts: list[str]) -> Reading[None]:
    """Read a value that is the whole text; `parts` stays empty if it is none."""
    is_value = yield from PythonLiterals(reader, parts.append).value()
    yield from reader.spaces()
    if not is_value or (yield from reader.peek()) != "":
        parts.clear()


class TypedText:
    """The JSON of one value whose text comes in pieces. A string is passed on as it comes, others when they end."""

    def __init__(self, kinds: frozenset[str], sink: Sink) -> None:
        self._kinds = kinds
        self._sink = sink
        self._reader = Reader()
        self._reading = self._read()

    def put(self, text: str) -> None:
        self._reader.append(text)
        next(self._reading, None)

    def end(self) -> None:
        """The value ends here. One that is cut is not ended: what came of a string has been passed on."""
        self._reader.end()
        next(self._reading, None)

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.hold()
        if self._kinds != TEXT:  # read on as long as it may be something else
            yield from reader.spaces()
            if "string" in self._kinds and (yield from reader.peek()) not in ("{", "[", '"', "'"):
                yield from reader.run(_WORD, nowhere, MAX_SHORT)
                yield from reader.spaces()
            else:
                yield from reader.until((), nowhere)
            if (yield from reader.peek()) == "":
                text = reader.let_go()
                self._sink(value_in(text, self._kinds) or f'"{inner_json(text)}"')
                return
        self._sink(f'"{inner_json(reader.let_go())}')
        yield from reader.until((), lambda piece: self._sink(inner_json(piece)))
        self._sink('"')
