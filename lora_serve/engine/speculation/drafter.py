"""One sequence's guesses: its look-up and its owner's habits, whichever is right more often."""

from __future__ import annotations

from collections.abc import Collection

from lora_serve.engine.speculation.acceptance import Acceptance, kind_of_habit, kind_of_match
from lora_serve.engine.speculation.habits import Habits
from lora_serve.engine.speculation.lookup import LONGEST_MATCH, PromptLookup

_BATCH = 8  # tokens that habits are learned from at a time

Guess = tuple[int, int]  # a token and its kind


class Drafter:
    """Guesses for one sequence. `token_ids` is its own list of prompt and output, which grows at its end only."""

    __slots__ = (
        "_draft", "_ends", "_habits", "_lookup", "_num_learned", "_teaches", "_tokens", "acceptance", "allowance",
        "guesses",
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
        self.guesses: list[Guess] = []  # for the next token, of any kind
        self._draft: list[Guess] = []  # the best for it and those after it
        self._num_learned = max(3, num_prompt)  # of the tokens, those that habits were learned from
        self.allowance = acceptance.allowance
        self._teaches = self.allowance.seconds > 0

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
            following = self._habits_after(one, two, three)
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
            self.allowance.pay_lesson(num_known - self._num_learned)
            for place in range(self._num_learned, num_known):
                self._habits.learn(tokens[place - 3], tokens[place - 2], tokens[place - 1], tokens[place])
            self._num_learned = num_known

    def _habits_after(self, one: int, two: int, three: int) -> list[Guess]:
        after_three, after_two = self._habits.after(one, two, three)
        if after_two is None:
            return []
        found = [(after_two[0], kind_of_habit(2, after_two[1]))]
        if after_three is not None:
            found.append((after_three[0], kind_of_habit(3, after_three[1])))
        return found
