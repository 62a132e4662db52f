"""Values that are written as bare text, typed by a JSON schema: a string is the text itself, another value its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_serve.text.pieces import Reader, Reading, Sink, inner_json, nowhere
from lora_serve.text.python_literals import PythonLiterals

KINDS = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
TEXT = frozenset(("string",))
_OF_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_OPENING = {"{": "object", "[": "array", '"': "string", "'": "string"}
_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}
_WHOLE = re.compile(r"-?[0-9]+(\.0+)?")
_END = "\n"  # by which a number is known to have ended


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


class TypedText:
    """The JSON of one value whose text comes in pieces. A string is passed on as it comes, another value when it ends.

    Values may be written as JSON or as Python's literals. What is none of `kinds` is a string; a string in quotes is
    read as one where any kind may be, and null where no string may be.
    """

    def __init__(self, kinds: frozenset[str], sink: Sink) -> None:
        self._kinds = kinds
        self._sink = sink
        self._reader = Reader()
        self._is_text = kinds == TEXT  # beyond doubt
        self._reading = self._read()

    def put(self, text: str) -> None:
        self._reader.append(text)
        next(self._reading, None)

    def end(self) -> None:
        """The value ends here. One that is cut is not ended: what came of a string has been passed on."""
        self._reader.append("" if self._is_text else _END)
        self._reader.end()
        next(self._reading, None)

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.hold()
        if not self._is_text:
            value = yield from self._value()
            if reader.is_ended:
                yield from reader.until((), nowhere)
                self._sink(value or f'"{inner_json(reader.let_go().removesuffix(_END))}"')
                return
        self._is_text = True
        self._sink(f'"{inner_json(reader.let_go())}')
        yield from reader.until((), lambda piece: self._sink(inner_json(piece)))
        self._sink('"')

    def _value(self) -> Reading[str]:
        """Read the text as a value, as far as it may be one; empty if it is none."""
        reader, parts = self._reader, list[str]()
        yield from reader.spaces()
        if not self._allows(_OPENING.get((yield from reader.peek()), "")):
            return ""
        is_value = yield from PythonLiterals(reader, parts.append).value()
        yield from reader.spaces()  # to the end, or else it is none
        value = "".join(parts) if is_value else ""
        is_whole = "integer" in self._kinds and _WHOLE.fullmatch(value)
        return value if is_whole or self._allows(_OPENING.get(value[:1]) or _WORDS.get(value, "number")) else ""

    def _allows(self, kind: str) -> bool:
        if kind == "string":
            return self._kinds == KINDS
        return kind in self._kinds or not kind or (kind == "null" and "string" not in self._kinds)


def typed(text: str, kinds: frozenset[str]) -> str:
    """The JSON of the value of one of `kinds` that `text` stands for."""
    parts: list[str] = []
    value = TypedText(kinds, parts.append)
    value.put(text)
    value.end()
    return "".join(parts)
