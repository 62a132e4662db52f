"""Texts of a request as a template writes them: each character that could be a part of a control token is a mark.

A mark is a private-use character that occurs nowhere else in the chat. Whatever the template does to a text, its marks
stay marks: there is no operation that gives the text itself to the template. A template's questions about a text (does
it hold `</think>`? what stands before it?) are answered as for the text itself, so that the template writes the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, SupportsIndex, TypeVar

from lora_serve.core.errors import InvalidRequestError

V = TypeVar("V")
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_FEW = 16  # marks that are put by one `replace` each; more are put by one `translate`


def _asked(name: str) -> Callable[..., Any]:
    """A method of `str` that answers a question about the true text and returns no text."""

    def method(self: Marked, *values: Any) -> Any:
        return getattr(true_text(self), name)(*map(true_text, values))

    return method


def _in_case(change: Callable[[str], str]) -> Callable[[Marked], Marked]:
    """A change of case. A marked letter keeps its mark; if the number of letters changes, all of them are marked."""

    def method(self: Marked) -> Marked:
        true = true_text(self)
        changed = change(true)
        if len(changed) == len(true):
            letters = zip(str.__iter__(self), true, changed, strict=True)
            return self._with("".join(new if mark == old else mark for mark, old, new in letters), changed)
        mark = next((mark for mark, old in zip(str.__iter__(self), true, strict=True) if mark != old), None)
        return self._with(changed if mark is None else mark * len(changed), changed)

    return method


class Marked(str):
    """A text that is written with marks and answers as if there were none; the true text has the same length."""

    _true: str
    _meaning: Callable[[str], str]

    def __new__(cls, marked: str, true: str | None = None, meaning: Callable[[str], str] = str.__str__) -> Marked:
        """`true`: the text without marks; None if there are none. `meaning` maps a text made from this one to its true
        text.
        """
        made = super().__new__(cls, marked)
        made._true, made._meaning = str.__str__(marked) if true is None else true, meaning
        return made

    def _with(self, marked: str, true: str) -> Marked:
        return Marked(marked, true, self._meaning)

    def _part(self, start: int, end: int) -> Marked:
        return self._with(str.__getitem__(self, slice(start, end)), self._true[start:end])

    def _walk(self, true_parts: Iterable[str], gap: int) -> list[Marked]:
        """Consecutive parts with `gap` characters between them."""
        lengths = [len(part) for part in true_parts]
        starts = accumulate(lengths, lambda start, length: start + length + gap, initial=0)
        return [self._part(start, start + length) for start, length in zip(starts, lengths, strict=False)]

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self._part(index, index + 1) for index in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> Marked:
        return self._with(str.__getitem__(self, key), self._true[key])

    def __add__(self, other: str) -> Marked:
        return self._with(str.__add__(self, other), self._true + true_text(other))

    def __radd__(self, other: str) -> Marked:
        return self._with(str.__add__(other, self), true_text(other) + self._true)

    def __mul__(self, times: SupportsIndex) -> Marked:
        return self._with(str.__mul__(self, times), self._true * times)

    __rmul__ = __mul__

    def strip(self, characters: str | None = None) -> Marked:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> Marked:
        return self._part(len(self) - len(self._true.lstrip(true_text(characters))), len(self))

    def rstrip(self, characters: str | None = None) -> Marked:
        return self._part(0, len(self._true.rstrip(true_text(characters))))

    def removeprefix(self, prefix: str) -> Marked:
        return self._part(len(self) - len(self._true.removeprefix(true_text(prefix))), len(self))

    def removesuffix(self, suffix: str) -> Marked:
        return self._part(0, len(self._true.removesuffix(true_text(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        if sep is None:  # no mark stands for white space
            return self._pairs(str.split(self, None, maxsplit), self._true.split(None, maxsplit))
        return self._walk(self._true.split(true_text(sep), maxsplit), len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        if sep is None:
            return self._pairs(str.rsplit(self, None, maxsplit), self._true.rsplit(None, maxsplit))
        return self._walk(self._true.rsplit(true_text(sep), maxsplit), len(sep))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._pairs(str.splitlines(self, keepends), self._true.splitlines(keepends))

    def partition(self, sep: str) -> tuple[Any, Any, Any]:
        before, between, after = self._walk(self._true.partition(true_text(sep)), 0)
        return before, between, after

    def rpartition(self, sep: str) -> tuple[Any, Any, Any]:
        before, between, after = self._walk(self._true.rpartition(true_text(sep)), 0)
        return before, between, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Marked:
        if not len(old):
            return self._with(str.replace(self, "", new, count), self._true.replace("", true_text(new), count))
        return Marked(new, true_text(new), self._meaning).join(self.split(old, count))

    def join(self, parts: Iterable[str]) -> Marked:
        listed = list(parts)
        return self._with(str.join(self, listed), self._true.join(map(true_text, listed)))

    def _pairs(self, marked: Sequence[str], true: Sequence[str]) -> list[Marked]:
        return [self._with(part, true_part) for part, true_part in zip(marked, true, strict=True)]


_QUESTIONS = """__contains__ __eq__ __ge__ __gt__ __hash__ __le__ __lt__ __ne__ count endswith find index isalnum
isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable istitle isupper rfind rindex startswith"""
for _name in _QUESTIONS.split():
    setattr(Marked, _name, _asked(_name))
for _name in ("upper", "lower", "casefold", "capitalize", "title", "swapcase"):
    setattr(Marked, _name, _in_case(getattr(str, _name)))


def true_text(value: V) -> V:
    """The true text of a marked text; other values are returned as they are, tuples (of `startswith`) by element."""
    if isinstance(value, Marked):
        return value._true  # type: ignore[return-value] # noqa: SLF001
    return tuple(map(true_text, value)) if isinstance(value, tuple) else value  # type: ignore[return-value]


def joined(pieces: Iterable[object]) -> str:
    """`"".join` for templates: if a piece is marked, the whole answers as the true text would."""
    parts = [piece if isinstance(piece, str) else str(piece) for piece in pieces]
    meaning = next((part._meaning for part in parts if isinstance(part, Marked)), None)  # noqa: SLF001
    if meaning is None:
        return "".join(parts)
    return Marked("".join(parts), "".join(map(meaning, parts)), meaning)


class Marks:
    """The marks of one chat. Each mark stands for one character, and no mark occurs in `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        taken = set(chain.from_iterable(_PRIVATE.findall(text) for text in texts if not text.isascii()))
        numbers = chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free: Iterator[str] = (chr(number) for number in numbers if chr(number) not in taken)
        self._marks: dict[str, str] = {}
        self._meanings: dict[str, str] = {}

    def put(self, text: str, characters: Iterable[str]) -> Marked:
        """`text` with marks in place of `characters`. Raises InvalidRequestError if no mark is left."""
        marks = {character: self._mark_of(character) for character in characters}
        marked = text
        if len(marks) > _FEW:
            marked = text.translate({ord(character): mark for character, mark in marks.items()})
        else:
            for character, mark in marks.items():
                marked = marked.replace(character, mark)
        return Marked(marked, text, self.meaning)

    @staticmethod
    def of(meanings: Mapping[str, str]) -> Marks:
        """The marks of a chat in another process, by their meanings. No more can be put."""
        marks = Marks(())
        marks._free, marks._meanings = iter(()), dict(meanings)
        return marks

    @property
    def meanings(self) -> Mapping[str, str]:
        """The character that each mark stands for."""
        return self._meanings

    def meaning(self, text: str) -> str:
        """The true text of a text with marks, after any change by a template."""
        true = str.__str__(true_text(text))
        return true if true.isascii() else _PRIVATE.sub(lambda found: self._meanings.get(found[0], found[0]), true)

    def _mark_of(self, character: str) -> str:
        if character not in self._marks:
            mark = next(self._free, None)
            if mark is None:
                message = "The messages hold the text of a control token and all private-use characters of Unicode."
                raise InvalidRequestError(message, param="messages")
            self._marks[character], self._meanings[mark] = mark, character
        return self._marks[character]


def packed(value: Any) -> Any:
    """The value in JSON's types, for a process that renders: JSON cannot make objects of its own.

    A value is written with its kind, so that marked texts keep what they stand for: [0, items], [1, pairs], [2, marked
    text, true text]; everything else stands for itself.
    """
    match value:
        case Marked():
            return [2, str.__str__(value), str.__str__(true_text(value))]
        case Mapping():
            return [1, [[packed(key), packed(item)] for key, item in value.items()]]
        case list() | tuple():
            return [0, [packed(item) for item in value]]
    return value


def unpacked(value: Any, meaning: Callable[[str], str]) -> Any:
    """The value that was packed; `meaning`: of its marks."""
    if not isinstance(value, list):
        return value
    if value[0] == 2:
        return Marked(value[1], value[2], meaning)
    if value[0] == 1:
        return {unpacked(key, meaning): unpacked(item, meaning) for key, item in value[1]}
    return [unpacked(item, meaning) for item in value[1]]
