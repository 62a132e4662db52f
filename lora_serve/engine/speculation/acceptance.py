"""The part of guesses that come true, learned for each adapter and kind of guess."""

from __future__ import annotations

from collections import OrderedDict

from lora_serve.engine.speculation.habits import LONGEST_STREAK
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
_MAX_ADAPTERS = 4096


def kind_of_match(num_matched: int) -> int:
    """The kind of a guess by look-up."""
    return num_matched - 1


def kind_of_habit(num_tokens: int, streak: int) -> int:
    """The kind of a guess by habit after two or three tokens."""
    return LONGEST_MATCH + (num_tokens - 2) * (LONGEST_STREAK + 1) + streak


class Acceptance:
    """The rates of one adapter's guesses. Also a guess that was not run is compared with the token that came."""

    def __init__(self) -> None:
        self.rates = [*_FIRST_LOOKUPS, *_FIRST_HABITS, *_FIRST_HABITS]
        self._num_seen = [_FIRST_WEIGHT] * NUM_KINDS
        self.num_drafted = 0  # tokens that were run
        self.num_accepted = 0
        self.num_fruitless = 0  # times in a row, over all rows, that no guess was worth running

    def note(self, kind: int, *, is_right: bool) -> None:
        """Learns from one guess."""
        self._num_seen[kind] += 1
        weight = max(_FORGETTING, 1 / self._num_seen[kind])
        self.rates[kind] += weight * (is_right - self.rates[kind])


class AcceptanceByAdapter:
    """The rates of the adapters that were seen last; those of the base model under no digest."""

    def __init__(self) -> None:
        self._adapters: OrderedDict[tuple[str, ...], Acceptance] = OrderedDict()

    def of(self, digests: tuple[str, ...]) -> Acceptance:
        found = self._adapters.setdefault(digests, Acceptance())
        self._adapters.move_to_end(digests)
        if len(self._adapters) > _MAX_ADAPTERS:
            self._adapters.popitem(last=False)
        return found

    def busiest(self, count: int) -> list[tuple[tuple[str, ...], Acceptance]]:
        """Those with the most tokens drafted, the most first."""
        drafted = [item for item in self._adapters.items() if item[1].num_drafted]
        return sorted(drafted, key=lambda item: -item[1].num_drafted)[:count]
