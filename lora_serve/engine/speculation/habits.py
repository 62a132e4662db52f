"""The token that came last after two or three others, in answers of the same adapters for the same tenant.

An adapter that fills in a form (JSON, SQL, a call of a tool) repeats the form's tokens in every answer, and its prompt
does not hold them: prompt look-up over the answers before this one (Fu et al., Break the Sequential Dependency of LLM
Inference Using Lookahead Decoding, 2024, keep such a pool of n-grams for one request). Nothing crosses from a tenant to
another, as with the KV cache's prefixes: how fast an answer comes would tell.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TypeVar

LONGEST_STREAK = 3
_MAX_CONTEXTS = 8192  # of one owner and length
_FORGOTTEN = (
    1024  # the oldest, at a time: each look for the first key of a dictionary passes over all that were deleted
)
_MAX_ALL = 2**17  # of all owners together, some 25 MB
_MAX_OWNERS = 1024

Habit = tuple[int, int]  # the token that came last, and how many times in a row it had come before
_Context = TypeVar("_Context", tuple[int, int], tuple[int, int, int])
Owner = tuple[str, tuple[str, ...]]  # the tenant, as the prefix cache knows it, and the adapters' digests


class Tally:
    """The number of habits of all owners together, counted as they come and go."""

    __slots__ = ("num_habits",)

    def __init__(self) -> None:
        self.num_habits = 0


class Habits:
    """The habits of one owner: adapters, and the tenant whose requests they answer."""

    def __init__(self, tally: Tally | None = None) -> None:
        self._tally = tally or Tally()
        self._after_two: dict[tuple[int, int], Habit] = {}
        self._after_three: dict[tuple[int, int, int], Habit] = {}

    def __len__(self) -> int:
        return len(self._after_two) + len(self._after_three)

    def after(self, one: int, two: int, three: int) -> tuple[Habit | None, Habit | None]:
        """The habit after these three tokens, and the one after the last two of them."""
        short = self._after_two.get((two, three))
        return (None if short is None else self._after_three.get((one, two, three))), short

    def learn(self, one: int, two: int, three: int, token: int) -> None:
        """Notes that `token` came after these three."""
        self._tally.num_habits += _note(self._after_two, (two, three), token)
        self._tally.num_habits += _note(self._after_three, (one, two, three), token)

    def leave(self) -> None:
        """Counts no longer among the others; rows that run go on with it."""
        self._tally.num_habits -= len(self)
        self._tally = Tally()


def _note(habits: dict[_Context, Habit], context: _Context, token: int) -> int:
    """Returns by how many there are more now."""
    known, num_before = habits.get(context), len(habits)
    if known is None:
        if num_before >= _MAX_CONTEXTS:
            for oldest in list(islice(habits, _FORGOTTEN)):
                del habits[oldest]
        habits[context] = (token, 0)
    elif known[0] != token:
        habits[context] = (token, 0)
    elif known[1] < LONGEST_STREAK:
        habits[context] = (token, known[1] + 1)
    return len(habits) - num_before


class HabitsByOwner:
    """The habits of the owners that were seen last."""

    def __init__(self) -> None:
        self._owners: OrderedDict[Owner, Habits] = OrderedDict()
        self._tally = Tally()

    def of(self, owner: Owner) -> Habits:
        """The habits of one owner; room is made for them among the others."""
        found = self._owners.setdefault(owner, Habits(self._tally))
        self._owners.move_to_end(owner)
        while len(self._owners) > _MAX_OWNERS or self._tally.num_habits > _MAX_ALL:
            self._owners.popitem(last=False)[1].leave()
        return found
