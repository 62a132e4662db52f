"""One sequence's guesses: its look-up and its owner's habits, whichever is right more often."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lora_serve.engine.speculation.acceptance import Acceptance, kind_of_habit, kind_of_match
from lora_serve.engine.speculation.habits import Habits
from lora_serve.engine.speculation.lookup import LONGEST_MATCH, PromptLookup

_PATIENCE = 4  # steps without a draft, after which some are passed over
_PATIENCE_WITH_ALL = 32  # likewise over all rows of an adapter, for each step of rest
_LONGEST_REST = 8  # steps
_BATCH = 8  # tokens that habits are learned from at a time


class _Candidate(NamedTuple):
    token: int
    kind: int
    position: int = 0  # in the sequence, of a guess by look-up; 0: by habit


class Drafter:
    """Guesses for one sequence. `token_ids` is its own list of prompt and output, which grows at its end only."""

    __slots__ = (
        "_candidates", "_draft", "_ends", "_habits", "_lookup", "_num_fruitless", "_num_learned", "_rest", "_tokens",
        "acceptance",
    )  # fmt: skip

    def __init__(
        self,
        token_ids: list[int],
        habits: Habits,
        acceptance: Acceptance,
        ends: Collection[int] = (),
        num_prompt: int = 3,
    ) -> None:
        """`ends`: tokens that end the output, behind which there is nothing to guess."""
        self._tokens = token_ids
        self._ends = ends
        self._lookup = PromptLookup(token_ids)
        self._habits = habits
        self.acceptance = acceptance
        self._candidates: list[_Candidate] = []  # for the next token
        self._draft: list[_Candidate] = []  # as far as it was worked out
        self._num_learned = max(3, num_prompt)  # of the tokens, those that habits were learned from
        self._num_fruitless = 0
        self._rest = min(_LONGEST_REST, acceptance.num_fruitless // _PATIENCE_WITH_ALL)

    def rests(self) -> bool:
        """True if this step is passed over: a text that nothing can be guessed of should cost nothing."""
        self._rest -= 1
        return self._rest >= 0

    def read(self, most: int) -> int:
        """Takes new tokens into the index, `most` at most; returns their number."""
        count = min(most, self._lookup.num_missing)
        self._lookup.read(count)
        return count

    def draft(self, most: int, least_rate: float) -> list[float]:
        """Works out the next tokens, `most` at most, each with the probability that it and all before it come true.

        Ends before a token whose probability is not above `least_rate`.
        """
        self._draft = []
        found = self._work_out(most, least_rate)
        shared = self.acceptance
        self._num_fruitless = 0 if found else self._num_fruitless + 1
        shared.num_fruitless = 0 if found else shared.num_fruitless + 1
        rest = max(self._num_fruitless - _PATIENCE, shared.num_fruitless // _PATIENCE_WITH_ALL)
        self._rest = min(_LONGEST_REST, rest)
        return found

    def _work_out(self, most: int, least_rate: float) -> list[float]:
        candidates = self._candidates = self._first()
        if not candidates:
            return []
        rates, probability = self.acceptance.rates, 1.0
        found: list[float] = []
        tail = tuple(self._tokens[-3:])
        while candidates and len(found) < most:
            best = max(candidates, key=lambda candidate: rates[candidate.kind])
            probability *= rates[best.kind]
            if probability <= least_rate or best.token in self._ends:
                break
            found.append(probability)
            self._draft.append(best)
            if len(found) < most:
                tail = (*tail, best.token)[-3:]
                candidates = self._next(best, tail)
        return found

    def take(self, count: int) -> tuple[int, ...]:
        """The first tokens of the draft that was worked out."""
        del self._draft[count:]
        return tuple(candidate.token for candidate in self._draft)

    def learn(self, num_before: int, *, is_last: bool) -> None:
        """Compares the tokens that came after the first `num_before` with the guesses, if there are any."""
        tokens, num_known = self._tokens, len(self._tokens)
        if self._candidates and num_known > num_before:
            came = tokens[num_before]
            for candidate in self._candidates:
                if candidate.token in self._ends:
                    continue  # it would not have been drafted
                self.acceptance.note(candidate.kind, is_right=candidate.token == came)
            for place, candidate in enumerate(self._draft[1 : num_known - num_before], num_before + 1):
                self.acceptance.note(candidate.kind, is_right=candidate.token == tokens[place])
            self._candidates, self._draft = [], []
        if is_last or num_known >= self._num_learned + _BATCH:
            for place in range(self._num_learned, num_known):
                self._habits.learn(tokens[place - 3], tokens[place - 2], tokens[place - 1], tokens[place])
            self._num_learned = num_known

    def _first(self) -> list[_Candidate]:
        tokens = self._tokens
        if len(tokens) < 3:
            return []
        one, two, three = tokens[-3:]
        found = self._by_habit(one, two, three)
        guess = self._lookup.guess()
        if guess is not None:
            position, num_matched = guess
            found.append(_Candidate(tokens[position], kind_of_match(num_matched), position))
        return found

    def _next(self, last: _Candidate, tail: tuple[int, ...]) -> list[_Candidate]:
        """Candidates behind a draft that ends with `last`."""
        one, two, three = tail
        found = self._by_habit(one, two, three)
        if last.position:
            drafted = [candidate.token for candidate in self._draft]
            kind = min(last.kind + 1, kind_of_match(LONGEST_MATCH))
            found.append(_Candidate(self._lookup.token_at(last.position + 1, drafted), kind, last.position + 1))
        elif position := self._lookup.after(two, three):
            found.append(_Candidate(self._tokens[position], kind_of_match(2), position))
        return found

    def _by_habit(self, one: int, two: int, three: int) -> list[_Candidate]:
        after_three, after_two = self._habits.after(one, two, three)
        if after_two is None:
            return []
        found = [_Candidate(after_two[0], kind_of_habit(2, after_two[1]))]
        if after_three is not None:
            found.append(_Candidate(after_three[0], kind_of_habit(3, after_three[1])))
        return found
