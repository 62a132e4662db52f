"""Finds where JSON can be cut without parsing: between elements of a list or object, within a window of bytes.

Mistakes in the text are not found here: mismatched brackets give wrong cuts, and the parser refuses the parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SLICE = 2**14  # bytes that are looked at, or parsed, at once: 3 ms, and a turn of the event loop waits for several

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^"\[\]{}]++|' + _STRING
_INSIDE = _PLAIN
for _ in range(8):  # levels that are looked through at once
    _NESTED = rb"[\[{](?:" + _INSIDE + rb")*+[\]}]"
    _INSIDE = _PLAIN + rb"|" + _NESTED
_WITHOUT_COMMA = rb'[^",\[\]{}]++|' + _STRING
_TO_BRACKET = re.compile(rb"(?:" + _PLAIN + rb")*+", re.DOTALL)
_FLAT_ELEMENTS = re.compile(rb"(?:(?:" + _WITHOUT_COMMA + rb")*+,)*+", re.DOTALL)
_ELEMENTS = re.compile(rb"(?:(?:" + _WITHOUT_COMMA + rb"|" + _NESTED + rb")*+,)*+", re.DOTALL)
_OPENING = b"[{"


@dataclass(slots=True)
class Level:
    """A list or object that does not end in the window: where its elements begin and its last nested one ends."""

    start: int
    last_nested_end: int


@dataclass(frozen=True, slots=True)
class Window:
    """The brackets in a window that begins inside a list or object."""

    levels: list[Level]  # open at its end, outermost first
    closed_at: int | None  # the bracket that ends the outermost; None: it does not end here


def whole_elements(raw: bytes, start: int, end: int) -> int:
    """The position after the comma of the last element that is not nested too deeply for one look; `start`: none."""
    return _end_of(_ELEMENTS, raw, start, end)


def look(raw: bytes, start: int, end: int) -> Window:
    """Look at every bracket of the window."""
    levels, at = [Level(start, start)], start
    while True:
        at = _end_of(_TO_BRACKET, raw, at, end)
        if at >= end or raw[at] == 0x22:  # a string that does not end in the window
            return Window(levels, None)
        if raw[at] in _OPENING:
            levels.append(Level(at + 1, at + 1))
        else:
            levels.pop()
            if not levels:
                return Window([], at)
            levels[-1].last_nested_end = at + 1
        at += 1


def cut(raw: bytes, level: Level, end: int) -> tuple[int, int]:
    """The position before `end` where a level's whole elements end, and the one behind their comma; the same position
    twice if no comma follows.
    """
    after = _end_of(_FLAT_ELEMENTS, raw, level.last_nested_end, end)
    return (after - 1, after) if after > level.last_nested_end else (after, after)


def _end_of(pattern: re.Pattern[bytes], raw: bytes, start: int, end: int) -> int:
    found = pattern.match(raw, start, end)
    return start if found is None else found.end()
