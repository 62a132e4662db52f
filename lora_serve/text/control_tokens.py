"""Control tokens: the tokens that only a chat's template writes, kept apart from the same text in a request.

Control tokens are the tokenizer's special tokens, and the added tokens with which the template marks its text, such as
`<think>`. The chat with marks (`marked.py`) shows where the template wrote them. The chat is then tokenised by a view
of the tokenizer in which a private-use character stands for each control token, so that all other text is ordinary
text, even if it spells a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models

from lora_serve.core.errors import InvalidRequestError

_WORD_STARTS = "▁Ġ"  # spaces, as vocabularies spell them
_STAND_INS = [chr(number) for number in range(0xF8000, 0xF8010)]  # as many as there are kinds of tokens
_Flags = tuple[bool, bool, bool, bool]


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """The place of a control token in a chat: characters `start` to `end`, with white space that belongs to it."""

    start: int
    end: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tokenizer that takes the text of control tokens as ordinary text and private-use characters as the tokens."""

    tokenizer: Tokenizer
    stand_ins: dict[_Flags, str]
    stand_in_ids: frozenset[int]
    ids: dict[int, int]  # of the view's added tokens -> ids of the tokenizer


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as text. `places` of its control tokens are given only if text of the request looks like one."""

    text: str
    places: tuple[TokenPlace, ...] | None = None


class ControlTokens:
    """The control tokens of one tokenizer (a base's, or with the tokens of an adapter) and one template."""

    def __init__(self, backend: Tokenizer, template: str, *, listed: Sequence[str] | None, unknown: str | None) -> None:
        """`listed`: the control tokens that are not special, if the tokenizer's files name them. `unknown`: the token
        for text that the vocabulary cannot spell; any text may give it.
        """
        self._backend = backend
        self._own = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._ids = {
            number
            for number, token in self._own.items()
            if any(map(can_be_marked, token.content)) and (token.special or _is_structure(token, template, listed))
        }
        self._tokens = {number: self._own[number] for number in self._ids}
        self.texts = tuple(sorted((token.content for token in self._tokens.values()), key=len, reverse=True))
        self._never = frozenset(number for number, token in self._tokens.items() if token.content != unknown)
        is_normalized = any(token.normalized for token in self._tokens.values())
        self._normalizer: Any = backend.normalizer if is_normalized else None
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._longest = max(map(len, self.texts), default=0)
        self._together = "\0".join(self.texts).casefold()
        self._letters = _in_any_case(filter(can_be_marked, "".join(self.texts)))
        self._edges = _in_any_case(edge for text in self.texts for edge in _edges(text))

    def characters(self, text: str) -> frozenset[str]:
        """The characters with which `text` could become part of a control token, whatever the template does with it.

        A long text can only hold a token's first or last character; a short one may be a token's middle. Empty if no
        control token can come of the text.
        """
        if self._normalizer is not None:
            forms = (text, self._normalizer.normalize_str(text))
            return frozenset(filter(can_be_marked, set(text))) if any(map(self._takes_part, forms)) else frozenset()
        if not self._takes_part(text):
            return frozenset()
        is_short = len(text.strip()) <= self._longest
        return self._letters.intersection(text) if is_short else self._edges.intersection(text)

    def _takes_part(self, text: str) -> bool:
        if any(edge in text for edge in self._edges):
            return True
        bare = text.strip()
        return 0 < len(bare) <= self._longest and bare.casefold() in self._together

    def found(self, text: str) -> list[tuple[int, str]]:
        """Start and text of each control token in `text`; found by the tokenizer itself if it normalises spellings."""
        if self._normalizer is not None:
            return [(place.start, self._tokens[place.token_id].content) for place in self.places(text)]
        return [(match.start(), match[0]) for match in self._pattern.finditer(text)]

    def places(self, text: str) -> tuple[TokenPlace, ...]:
        """The places of the control tokens that the tokenizer finds in `text`, which may have marks."""
        encoding: Encoding = self._splitter.encode(text, add_special_tokens=False)
        numbers = list(self._own)
        found = (
            (numbers[index - 1], span) for index, span in zip(encoding.ids, encoding.offsets, strict=True) if index
        )
        return tuple(TokenPlace(*span, number) for number, span in found if number in self._ids)

    def encode(self, text: str, places: tuple[TokenPlace, ...], add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a chat that has control tokens at `places` and nowhere else. Raises InvalidRequestError."""
        view = self._view if self._can_stand_in(text) else self._make_view(_others_than(text))
        written = "".join(self._written(view, text, places))
        encoding: Encoding = view.tokenizer.encode(written, add_special_tokens=add_special_tokens)
        left = iter(places)
        ids = [
            number if is_around else self._own_id(view, number, left)
            for number, is_around in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        ]
        if next(left, None) is not None:
            raise refused()
        return tuple(ids)

    def _written(self, view: _View, text: str, places: tuple[TokenPlace, ...]) -> Iterator[str]:
        """`text` with a stand-in at each place, between the white space that belongs to the token there."""
        end = 0
        for place in places:
            found, token = text[place.start : place.end], self._tokens[place.token_id]
            yield text[end : place.start] + _space_around(found, token.content)[0]
            yield view.stand_ins[_flags(token)] + _space_around(found, token.content)[1]
            end = place.end
        yield text[end:]

    def _own_id(self, view: _View, number: int, left: Iterator[TokenPlace]) -> int:
        if number in view.stand_in_ids:
            place = next(left, None)
            if place is None:
                raise refused()
            return place.token_id
        own = view.ids.get(number, number)
        if own in self._never:  # the plain vocabulary holds the token too, and ordinary text gave it
            raise refused()
        return own

    @cached_property
    def _splitter(self) -> Tokenizer:
        """A tokenizer of all added tokens, with one token for any text between them."""
        splitter = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if self._normalizer is not None:
            splitter.normalizer = self._normalizer
        splitter.add_tokens(list(self._own.values()))
        return splitter

    @cached_property
    def _view(self) -> _View:
        return self._make_view(_STAND_INS)

    def _can_stand_in(self, text: str) -> bool:
        return text.isascii() or not any(character in text for character in self._view.stand_ins.values())

    def _make_view(self, characters: Sequence[str]) -> _View:
        view = without_added_tokens(self._backend)
        ordinary = {number: token for number, token in self._own.items() if number not in self._ids}
        kinds = sorted({_flags(token) for token in self._tokens.values()})
        stand_ins = dict(zip(kinds, characters, strict=False))
        view.add_tokens([*ordinary.values(), *(_stand_in(character, flags) for flags, character in stand_ins.items())])
        known = {token.content: number for number, token in view.get_added_tokens_decoder().items()}
        ids = {known[token.content]: number for number, token in ordinary.items()}
        return _View(view, stand_ins, frozenset(known[character] for character in stand_ins.values()), ids)


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer without added tokens that shares the vocabulary, and its memory, with `tokenizer`."""
    view = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(tokenizer, part)) is not None:
            setattr(view, part, found)
    return view


def refused() -> InvalidRequestError:
    """The error for a chat in which the template's tokens cannot be told from text of the request."""
    message = (
        "The messages hold the text of a control token, such as the end of a turn, where the model's chat template "
        "or tokenizer cannot keep it apart from the token. Take it out."
    )
    return InvalidRequestError(message, param="messages")


def can_be_marked(character: str) -> bool:
    """False for white space, which templates trim, and for characters that JSON escapes."""
    return not (character.isspace() or character in '"\\' or character < " " or character == "\x7f")


def _is_structure(token: AddedToken, template: str, listed: Sequence[str] | None) -> bool:
    """True if the template writes a token that is not special to mark something; plain words and signs are text."""
    if listed is not None:
        return token.content in listed
    letters = [character.isalnum() for character in token.content if character not in _WORD_STARTS]
    return token.content in template and any(letters) and not all(letters)


def _edges(text: str) -> tuple[str, str]:
    """The first and the last character that can be marked."""
    usable = [character for character in text if can_be_marked(character)]
    return usable[0], usable[-1]


def _in_any_case(characters: Iterable[str]) -> frozenset[str]:
    """The characters in upper and lower case, as templates may change it."""
    return frozenset(form for letter in set(characters) for form in (letter, letter.lower(), letter.upper()))


def _space_around(found: str, content: str) -> tuple[str, str]:
    """White space before and after a token in `found`, beyond the token's own."""
    before, after = len(found) - len(found.lstrip()), len(found.rstrip())
    return found[:before] * (content == content.lstrip()), found[after:] * (content == content.rstrip())


def _flags(token: AddedToken) -> _Flags:
    return token.single_word, token.lstrip, token.rstrip, token.normalized


def _stand_in(character: str, flags: _Flags) -> AddedToken:
    single_word, lstrip, rstrip, normalized = flags
    return AddedToken(character, single_word=single_word, lstrip=lstrip, rstrip=rstrip, normalized=normalized)


def _others_than(text: str) -> list[str]:
    """Private-use characters that `text` does not hold, one for each kind of token. Raises InvalidRequestError."""
    taken = set(text)
    characters = map(chr, chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)))
    free = list(islice((character for character in characters if character not in taken), len(_STAND_INS)))
    if len(free) < len(_STAND_INS):
        raise refused()
    return free
