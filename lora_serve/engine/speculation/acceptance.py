"""The part of guesses that come true, learned for each tenant's adapter and kind of guess."""

from __future__ import annotations

from collections import OrderedDict

from lora_serve.engine.speculation.allowance import Allowance
from lora_serve.engine.speculation.habits import LONGEST_STREAK, Owner
from lora_serve.engine.speculation.lookup import LONGEST_MATCH

_FIRST_LOOKUPS = (
    0.1,
    0.3,
    0.5,
    0.6,
    0.7,
    0.7,
)  # by the tokens that match; low, as guesses need not be run to be learned from
_FIRST_HABITS = (0.1, 0.4, 0.6, 0.8)  # by the times that the habit was kept
NUM_KINDS = LONGEST_MATCH + 2 * (LONGEST_STREAK + 1)
_FORGETTING = 0.02  # weight of the newest guess, once there were enough
_FIRST_WEIGHT = 3.0  # guesses that the first rates count as
_MAX_OWNERS = 4096


def kind_of_match(num_matched: int) -> int:
    """The kind of a guess by look-up."""
    return num_matched - 1


def kind_of_habit(num_tokens: int, streak: int) -> int:
    """The kind of a guess by habit after two or three tokens."""
    return LONGEST_MATCH + (num_tokens - 2) * (LONGEST_STREAK + 1) + streak


class Acceptance:
    """The rates of one owner's guesses, and the time that is left for them.

    Also a guess that was not run is compared with the token that came.
    """

    def __init__(self) -> None:
        self.rates = [*_FIRST_LOOKUPS, *_FIRST_HABITS, *_FIRST_HABITS]
        self._num_seen = [_FIRST_WEIGHT] * NUM_KINDS
        self.num_drafted = 0  # tokens that were run
        self.num_accepted = 0
        self.allowance = Allowance()

    def note(self, kind: int, *, is_right: bool) -> None:
        """Learns from one guess."""
        self._num_seen[kind] += 1
        weight = max(_FORGETTING, 1 / self._num_seen[kind])
        self.rates[kind] += weight * (is_right - self.rates[kind])


class AcceptanceByOwner:
    """The rates of the owners that were seen last; no tenant's texts change what is guessed for another."""

    def __init__(self) -> None:
        self._owners: OrderedDict[Owner, Acceptance] = OrderedDict()

    def of(self, owner: Owner) -> Acceptance:
        found = self._owners.setdefault(owner, Acceptance())
        self._owners.move_to_end(owner)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)
        return found

    def busiest(self, count: int) -> list[tuple[tuple[str, ...], int, int]]:
        """The adapters with the most tokens drafted, over all tenants: their digests, tokens drafted and accepted."""
        sums: dict[tuple[str, ...], tuple[int, int]] = {}
        for (_, digests), one in self._owners.items():
            num_drafted, num_accepted = sums.get(digests, (0, 0))
            sums[digests] = num_drafted + one.num_drafted, num_accepted + one.num_accepted
        drafted = [(digests, *both) for digests, both in sums.items() if both[0]]
        return sorted(drafted, key=lambda item: -item[1])[:count]
