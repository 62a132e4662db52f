"""Literals as Python writes them, read piece by piece and passed on as the JSON of the same values."""

from __future__ import annotations

import json
import math
import re

from lora_serve.text.pieces import Literals, Reading, inner_json, number_json

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
