"""Guesses by look-up: the tokens that followed where a sequence's newest tokens stood before, in its prompt or answer.

Prompt look-up decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's `ngram`), with the
hash chains of Deflate (RFC 1951, section 4) as index: each position is chained to the one before it that the same
two tokens led to, so that a few steps along a chain find the longest match. One more token costs the same however
long the sequence is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 6  # tokens that are compared
_CHAIN = 8  # earlier places that are compared
_NOWHERE = 0  # no position: nothing stands before the first token


class Guess(NamedTuple):
    """The place of the tokens that may come next."""

    position: int  # of the first of them in the sequence
    num_matched: int  # tokens before it that are the sequence's newest; LONGEST_MATCH at most


class PromptLookup:
    """The index of one sequence. `token_ids` is the sequence's own list, which grows at its end only."""

    def __init__(self, token_ids: list[int]) -> None:
        self._tokens = token_ids
        self._after_one: dict[int, int] = {}  # token -> the last position that it led to
        self._after_two: dict[tuple[int, int], int] = {}
        self._before = array("i", (_NOWHERE,))  # position -> the one before it that the same two tokens led to

    @property
    def num_missing(self) -> int:
        """Tokens that are not in the index."""
        return len(self._tokens) - len(self._before)

    def read(self, most: int) -> None:
        """Takes in the next tokens, `most` at most."""
        tokens, after_two, before = self._tokens, self._after_two, self._before
        start = len(before)
        end = min(len(tokens), start + most)
        for position in range(start, end):
            one = tokens[position - 1]
            self._after_one[one] = position
            pair = (tokens[position - 2], one) if position > 1 else (-1, one)
            before.append(after_two.get(pair, _NOWHERE))
            after_two[pair] = position

    def guess(self) -> Guess | None:
        """The place that most of the newest tokens led to, the last such place; None: they are new."""
        tokens = self._tokens
        if len(tokens) < 2:
            return None
        position = self._after_two.get((tokens[-2], tokens[-1]), _NOWHERE)
        if position == _NOWHERE:
            position = self._after_one.get(tokens[-1], _NOWHERE)
            return None if position == _NOWHERE else Guess(position, 1)
        found, longest = position, 0
        for _ in range(_CHAIN):
            num_matched = self._num_matched(position)
            if num_matched > longest:
                found, longest = position, num_matched
            position = self._before[position]
            if longest == LONGEST_MATCH or position == _NOWHERE:
                break
        return Guess(found, longest)

    def after(self, one: int, two: int) -> int:
        """The last position that these two tokens led to; 0: none."""
        return self._after_two.get((one, two), _NOWHERE)

    def token_at(self, position: int, drafted: Sequence[int]) -> int:
        """The token at a position; behind the sequence's end the one that was `drafted` for it."""
        num_known = len(self._tokens)
        return self._tokens[position] if position < num_known else drafted[position - num_known]

    def _num_matched(self, position: int) -> int:
        """The tokens before the position that are equal to the newest ones; the first two are known to be."""
        tokens = self._tokens
        count, most = 2, min(position, LONGEST_MATCH)
        while count < most and tokens[position - 1 - count] == tokens[-1 - count]:
            count += 1
        return min(count, position)
