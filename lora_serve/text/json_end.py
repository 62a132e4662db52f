"""The end of one JSON value in a text that comes in pieces."""

from __future__ import annotations

import re

_SIGNS = re.compile(r'["\\{}\[\]]')


class JsonEnd:
    """Watches the text of one JSON object or list; `is_reached` once its last bracket came."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._skipped = -1  # place of a character behind a backslash, counted from the next piece's beginning
        self.is_reached = False

    def feed(self, piece: str) -> None:
        """Add a piece of the text."""
        if not piece:
            return
        skipped = self._skipped
        for found in _SIGNS.finditer(piece):
            if found.start() == skipped:
                continue
            sign = found.group()
            if sign == '"':
                self._is_string = not self._is_string
            elif sign == "\\":
                skipped = found.end()
            elif not self._is_string:
                self._depth += 1 if sign in "{[" else -1
                self.is_reached |= self._depth <= 0
        self._skipped = 0 if skipped == len(piece) else -1
