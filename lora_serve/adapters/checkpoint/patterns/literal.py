"""Patterns that are names, as trainers write them into `rank_pattern`: looked up, however many there are.

To a regex a bare dot stands for any character. So names are compared with blanks where a pattern has its dots, and
patterns with dots at the same places are looked up together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_LITERAL = re.compile(r"(?:[A-Za-z0-9_]|\\?\.)+")
_CHARACTER = re.compile(r"\\?.")
_MAX_SHAPES = 64  # trainers' names have a few; as many as somebody likes would be as slow as any patterns

Shape = tuple[int, tuple[int, ...]]  # length, and where any character will do
Shapes = Mapping[Shape, Mapping[str, Sequence[str]]]  # -> blanked text -> patterns


def literals_in(texts: Sequence[str]) -> Shapes:
    """The patterns that are names, by shape; empty if there are too many shapes."""
    shapes: dict[Shape, dict[str, list[str]]] = {}
    for text in texts:
        if _LITERAL.fullmatch(text):
            characters = _CHARACTER.findall(text)
            blanks = tuple(index for index, character in enumerate(characters) if character == ".")
            blanked = _blanked("".join(character[-1] for character in characters), blanks)
            shapes.setdefault((len(characters), blanks), {}).setdefault(blanked, []).append(text)
    return shapes if len(shapes) <= _MAX_SHAPES else {}


def match_literals(shapes: Shapes, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """pattern -> the names that it matches, to the end and from their start or a dot on. Names without line breaks."""
    found: dict[str, list[str]] = {text: [] for table in shapes.values() for texts in table.values() for text in texts}
    for name in names:
        ends = {len(end): end for end in tails(name)}
        for (length, blanks), table in shapes.items():
            if length in ends:
                for text in table.get(_blanked(ends[length], blanks), ()):
                    found[text].append(name)
    return {text: frozenset(matched) for text, matched in found.items()}


def tails(name: str) -> Iterator[str]:
    """The name, and what comes after each of its dots."""
    yield name
    for match in re.finditer(r"\.", name):
        yield name[match.end() :]


def _blanked(text: str, blanks: Sequence[int]) -> str:
    for index in blanks:
        text = f"{text[:index]}\n{text[index + 1 :]}"
    return text
