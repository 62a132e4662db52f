"""The marks of one chat, and which character each of them stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.marked import Marked, true_text

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_FEW = 16  # marks that are put by one `replace` each; more are put by one `translate`


class Marks:
    """The marks of one chat: each stands for one character, and none of them occurs in `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        taken = set(chain.from_iterable(_PRIVATE.findall(text) for text in texts if not text.isascii()))
        numbers = chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free = (chr(number) for number in numbers if chr(number) not in taken)
        self._marks: dict[str, str] = {}
        self._meanings: dict[str, str] = {}

    def put(self, text: str, characters: Iterable[str]) -> Marked:
        """`text` with marks for those `characters`. Raises InvalidRequestError if there are no marks left."""
        marks = {character: self._mark_of(character) for character in characters}
        marked = text
        if len(marks) > _FEW:
            marked = text.translate({ord(character): mark for character, mark in marks.items()})
        else:
            for character, mark in marks.items():
                marked = marked.replace(character, mark)
        return Marked(marked, text, self.meaning)

    def meaning(self, text: str) -> str:
        """The true text of one with marks, whatever a template has made of it."""
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
