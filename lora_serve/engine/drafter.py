"""One sequence's guesses of its next tokens: its look-up and its owner's n-grams, whichever is right more often.

Look-up: the tokens that followed where a sequence's newest tokens stood before, in its prompt or answer. Prompt look-up
decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's `ngram`), with the hash chains of
Deflate (RFC 1951, section 4) as index: each position is chained to the one before it that the same two tokens led to,
so that a few steps along a chain find the longest match. One more token costs the same however long the sequence is.

N-grams: the token that came last after two or three others, in answers of the same adapters for the same tenant. An
adapter that fills in a form (JSON, SQL, a call of a tool) repeats the form's tokens in every answer, and its prompt
does not hold them: prompt look-up over the answers before this one (Fu et al., Break the Sequential Dependency of LLM
Inference Using Lookahead Decoding, 2024, keep such a pool of n-grams for one request). Nothing crosses from a tenant to
another, as with the KV cache's prefixes: how fast an answer comes would tell.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from lora_serve.engine.acceptance import (
    LONGEST_MATCH,
    LONGEST_STREAK,
    Acceptance,
    Owner,
    kind_of_match,
    kind_of_ngram,
)

_CHAIN = 8  # earlier places that are compared
_NOWHERE = 0  # no position: nothing stands before the first token
_MAX_CONTEXTS = 8192  # of one owner and length
_FORGOTTEN = 1024  # the oldest, at a time: a look for the first key of a dictionary passes over all that were deleted
_MAX_ALL = 2**17  # of all owners together, some 25 MB
_MAX_OWNERS = 1024
_BATCH = 8  # tokens that n-grams are learned from at a time

Ngram = tuple[int, int]  # the token that came last, and how many times in a row it had come before
_Context = TypeVar("_Context", tuple[int, int], tuple[int, int, int])
Guess = tuple[int, int]  # a token and its kind


class Match(NamedTuple):
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

    def guess(self) -> Match | None:
        """The place that most of the newest tokens led to, the last such place; None: they are new."""
        tokens = self._tokens
        if len(tokens) < 2:
            return None
        position = self._after_two.get((tokens[-2], tokens[-1]), _NOWHERE)
        if position == _NOWHERE:
            position = self._after_one.get(tokens[-1], _NOWHERE)
            return None if position == _NOWHERE else Match(position, 1)
        found, longest = position, 0
        for _ in range(_CHAIN):
            num_matched = self._num_matched(position)
            if num_matched > longest:
                found, longest = position, num_matched
            position = self._before[position]
            if longest == LONGEST_MATCH or position == _NOWHERE:
                break
        return Match(found, longest)

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


class Tally:
    """The number of n-grams of all owners together, counted as they come and go."""

    __slots__ = ("num_ngrams",)

    def __init__(self) -> None:
        self.num_ngrams = 0


class NgramCache:
    """The n-grams of one owner: adapters, and the tenant whose requests they answer."""

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = tally or Tally()
        self._after_two: dict[tuple[int, int], Ngram] = {}
        self._after_three: dict[tuple[int, int, int], Ngram] = {}

    def __len__(self) -> int:
        return len(self._after_two) + len(self._after_three)

    def after(self, one: int, two: int, three: int) -> tuple[Ngram | None, Ngram | None]:
        """The n-gram of these three tokens and the next, and that of the last two of them and the next."""
        short = self._after_two.get((two, three))
        return (None if short is None else self._after_three.get((one, two, three))), short

    def learn(self, one: int, two: int, three: int, token: int) -> None:
        """Notes that `token` came after these three."""
        self._tally.num_ngrams += _note(self._after_two, (two, three), token)
        self._tally.num_ngrams += _note(self._after_three, (one, two, three), token)

    def leave(self) -> None:
        """Counts no longer among the others; rows that run go on with it."""
        self._tally.num_ngrams -= len(self)
        self._tally = Tally()


def _note(ngrams: dict[_Context, Ngram], context: _Context, token: int) -> int:
    """Returns by how many there are more now."""
    known, num_before = ngrams.get(context), len(ngrams)
    if known is None:
        if num_before >= _MAX_CONTEXTS:
            for oldest in list(islice(ngrams, _FORGOTTEN)):
                del ngrams[oldest]
        ngrams[context] = (token, 0)
    elif known[0] != token:
        ngrams[context] = (token, 0)
    elif known[1] < LONGEST_STREAK:
        ngrams[context] = (token, known[1] + 1)
    return len(ngrams) - num_before


class NgramCaches:
    """The n-grams of the owners that were seen last."""

    def __init__(self) -> None:
        self._owners: OrderedDict[Owner, NgramCache] = OrderedDict()
        self._tally = Tally()

    def of(self, owner: Owner) -> NgramCache:
        """The n-grams of one owner; others are dropped for them."""
        found = self._owners.setdefault(owner, NgramCache(self._tally))
        self._owners.move_to_end(owner)
        while len(self._owners) > _MAX_OWNERS or self._tally.num_ngrams > _MAX_ALL:
            self._owners.popitem(last=False)[1].leave()
        return found


class Drafter:
    """Guesses for one sequence. `token_ids` is its own list of prompt and output, which grows at its end only."""

    __slots__ = (
        "_draft", "_ends", "_lookup", "_ngrams", "_num_learned", "_teaches", "_tokens", "acceptance", "budget",
        "guesses",
    )  # fmt: skip

    def __init__(
        self,
        token_ids: list[int],
        ngrams: NgramCache,
        acceptance: Acceptance,
        ends: Collection[int] = (),
        num_prompt: int = 3,
    ) -> None:
        """`ends`: tokens that end the output, behind which there is nothing to guess."""
        self._tokens = token_ids
        self._ends = ends
        self._lookup = PromptLookup(token_ids)
        self._ngrams = ngrams
        self.acceptance = acceptance
        self.guesses: list[Guess] = []  # for the next token, of any kind
        self._draft: list[Guess] = []  # the best for it and those after it
        self._num_learned = max(3, num_prompt)  # of the tokens, those that n-grams were learned from
        self.budget = acceptance.budget
        self._teaches = self.budget.seconds > 0

    def read(self, most: int) -> int:
        """Takes new tokens into the index, `most` at most; returns their number."""
        count = min(most, self._lookup.num_missing)
        self._lookup.read(count)
        return count

    def draft(self, most: int, least_rate: float) -> list[float]:
        """Works out the next tokens, `most` at most, each with the probability that it and all before it come true.

        Ends before a token whose probability is not above `least_rate`.
        """
        self.guesses, self._draft = [], []
        found: list[float] = []
        if len(self._tokens) >= 3:
            self._work_out(found, most, least_rate)
        return found

    def _work_out(self, found: list[float], most: int, least_rate: float) -> None:
        rates, probability = self.acceptance.rates, 1.0
        drafted: list[int] = []
        one, two, three = self._tokens[-3:]
        position, num_matched = self._lookup.guess() or (0, 0)
        while len(found) < most:
            following = self._ngrams_after(one, two, three)
            copied = self._lookup.token_at(position, drafted) if position else None
            if copied is not None:
                following.append((copied, kind_of_match(num_matched)))
            if not drafted:
                self.guesses = following
            if not following:
                break
            token, kind = best = max(following, key=lambda guess: rates[guess[1]])
            probability *= rates[kind]
            if probability <= least_rate or token in self._ends:
                break
            found.append(probability)
            self._draft.append(best)
            drafted.append(token)
            one, two, three = two, three, token
            if token == copied:
                position, num_matched = position + 1, min(num_matched + 1, LONGEST_MATCH)
            else:
                position, num_matched = self._lookup.after(two, three), 2

    def take(self, count: int) -> tuple[int, ...]:
        """The first tokens of the draft that was worked out."""
        del self._draft[count:]
        return tuple(token for token, _ in self._draft)

    def learn(self, num_before: int, *, is_last: bool) -> None:
        """Compares the tokens that came after the first `num_before` with the guesses, if there were any."""
        tokens, num_known, note = self._tokens, len(self._tokens), self.acceptance.note
        if self.guesses and num_known > num_before:
            for token, kind in self.guesses:
                if token not in self._ends:  # which would not have been drafted
                    note(kind, is_right=token == tokens[num_before])
            for place, (token, kind) in enumerate(self._draft[1 : num_known - num_before], num_before + 1):
                note(kind, is_right=token == tokens[place])
            self.guesses, self._draft = [], []
        if self._teaches and (is_last or num_known >= self._num_learned + _BATCH):
            self.budget.pay_lesson(num_known - self._num_learned)
            for place in range(self._num_learned, num_known):
                self._ngrams.learn(tokens[place - 3], tokens[place - 2], tokens[place - 1], tokens[place])
            self._num_learned = num_known

    def _ngrams_after(self, one: int, two: int, three: int) -> list[Guess]:
        after_three, after_two = self._ngrams.after(one, two, three)
        if after_two is None:
            return []
        found = [(after_two[0], kind_of_ngram(2, after_two[1]))]
        if after_three is not None:
            found.append((after_three[0], kind_of_ngram(3, after_three[1])))
        return found
