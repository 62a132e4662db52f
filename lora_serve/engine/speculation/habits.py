"""The token that came last after two or three others, in answers of the same adapters for the same tenant.

An adapter that fills in a form (JSON, SQL, a call of a tool) repeats the form's tokens in every answer, where its prompt
does not hold them: prompt look-up over the answers before this one (as in Fu et al., Lookahead Decoding, 2024, whose pool
of n-grams is one request's). Nothing crosses from a tenant to another, as with the KV cache's prefixes: how fast an
answer comes would tell.
"""

from __future__ import annotations

from collections import OrderedDict

LONGEST_STREAK = 3
_MAX_CONTEXTS = 8192  # of one owner; the oldest is forgotten
_MAX_ALL = 2**17  # of all owners together, some 25 MB
_MAX_OWNERS = 1024

Owner = tuple[str, tuple[str, ...]]  # the tenant, as the prefix cache knows it, and the adapters' digests


class Habits:
    """The habits of one owner: adapters, and the tenant whose requests they answer."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def after(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        """The token that came last after these, and how many times in a row it had come before; None: they are new."""
        return self._after.get(context)

    def learn(self, context: tuple[int, ...], token: int) -> None:
        """Notes that the token came after two or three others."""
        known = self._after.get(context)
        if known is None and len(self._after) >= _MAX_CONTEXTS:
            del self._after[next(iter(self._after))]
        is_same = known is not None and known[0] == token
        streak = min(LONGEST_STREAK, known[1] + 1) if known is not None and is_same else 0
        self._after[context] = (token, streak)


class HabitsByOwner:
    """The habits of the owners that were seen last."""

    def __init__(self) -> None:
        self._owners: OrderedDict[Owner, Habits] = OrderedDict()

    def of(self, owner: Owner) -> Habits:
        """The habits of one owner; room is made for them among the others."""
        found = self._owners.setdefault(owner, Habits())
        self._owners.move_to_end(owner)
        while len(self._owners) > _MAX_OWNERS or sum(map(len, self._owners.values())) > _MAX_ALL:
            self._owners.popitem(last=False)
        return found
