"""Text that comes in pieces, read by generators that pause where the text so far ends.

A reading method is a generator: it yields when it needs more text and returns what it has read. What it decides
depends on characters alone, never on where the text was cut. Unread text is kept no longer than a marker may be, so
that reading is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

SPACE = re.compile(r"\s+")


def nowhere(_piece: str) -> None:
    """The sink of text that nobody wants."""


class Reader:
    """The text of one answer, of which `append` brings the next piece."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self.is_ended = False
        self._held: list[str] | None = None

    def append(self, text: str) -> None:
        """Add the next piece."""
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

    def spaces(self) -> Reading[None]:
        """Read white space."""
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
