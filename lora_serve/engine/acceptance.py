"""How often guesses come true, the time that they may take, and whether they pay by the clock.

Looking for guesses costs time whether any is found or not, and so does learning from answers. So each owner has an
account in seconds. Every step that gives one of its rows a token pays in a small share of that row's time, and
guesses that came true half of the time that they saved. Looks and lessons are paid from it; while it is empty there
are none. Where text can be guessed the account stays full and every step is looked at; where it cannot, looks become
as rare as the share pays for: often where steps are long, seldom where they are short.

Costs and rates are learned from a clock that other programs disturb, and a draft that was expected to pay may not. So
drafts are on trial: steps with and without take turns, until the tokens per second of those with are higher for sure,
or not. Then one step in 32 goes without, or many do, twice as many after each trial that failed; unless drafts turn up
that promise more than the last ones did by more than those broke of their promise.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
Owner = tuple[str, tuple[str, ...]]  # the tenant, as the prefix cache knows it, and the adapters' digests
SHARE = 1 / 500  # of a row's time in a step
_FIRST, _MOST = 1e-2, 2e-2  # seconds in an account
_LOOK, _ROW, _GUESS, _LESSON = 2e-5, 8e-6, 1e-6, 1e-6  # seconds, about: for a step's look, one row, one token of either
LONGEST_MATCH = 6  # tokens that a look-up compares
LONGEST_STREAK = 3  # times in a row that an n-gram came, as far as they are counted
# By the tokens that match; low, as guesses need not be run to be learned from:
_FIRST_LOOKUPS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.7)
_FIRST_NGRAMS = (0.1, 0.4, 0.6, 0.8)  # by the times in a row that the n-gram came
NUM_KINDS = LONGEST_MATCH + 2 * (LONGEST_STREAK + 1)
_FORGETTING = 0.02  # weight of the newest guess, once there were enough
_FIRST_WEIGHT = 3.0  # guesses that the first rates count as
_MAX_OWNERS = 4096
_NUM_KEPT, _NUM_PLAIN_KEPT = 64, 16  # steps with drafts and without
_LEAST_SAMPLES = 8  # steps with drafts before a verdict; and from one verdict to the next
_LEAST_FOR_LOSS = 4  # likewise, if the loss is plain
_PLAIN_LOSS, _PLAIN_DOUBTS = 0.1, 2.0  # as a logarithm, and in standard errors
_LONGEST_TRIAL = 32  # steps with drafts, after which a gain that is still not sure is none
_CONTROL_EVERY = 32  # steps, while drafts pay
_FIRST_REST, _LONGEST_REST = 128, 2048  # steps after a trial that failed
_LEAST_HURDLE = 0.2  # logarithm of the gain promised; and by how much it rises each time that was not kept either
_MAX_TRIALS = 4096
_NORMAL = 1.4826 * 1.2533  # times the median deviation, over the root of the number: the standard error of a median


class LastSeen(Generic[K, V]):
    """Values by key, each made when it is first asked for; of more than `most` the longest unused is dropped."""

    def __init__(self, make: Callable[[], V], most: int) -> None:
        self._make = make
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def of(self, key: K) -> V:
        if key not in self._values:
            self._values[key] = self._make()
        found = self._values[key]
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return found


class DraftBudget:
    """One owner's account. The prices are constants, so that what is guessed does not depend on a disturbed clock."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = _FIRST  # the share of each row's time is added by `scheduling/drafting.py`

    def earn(self, seconds: float) -> None:
        """Pays in for guesses that were run and saved `seconds`. Such as cost more are not charged for here: one step
        that a busy machine held up would empty the account, and a `DraftTrial` ends what does not pay.
        """
        self.seconds += max(0.0, seconds) / 2

    def pay_lookup(self, num_guessed: int, num_rows: int) -> None:
        """Pays for the guesses at one row, in a step that looks at `num_rows`."""
        self.seconds = min(self.seconds, _MOST) - _LOOK / num_rows - _ROW - num_guessed * _GUESS

    def pay_lesson(self, num_tokens: int) -> None:
        """Pays for the n-grams learned from so many tokens."""
        self.seconds -= num_tokens * _LESSON


def kind_of_match(num_matched: int) -> int:
    """The kind of a guess by look-up."""
    return num_matched - 1


def kind_of_ngram(num_tokens: int, streak: int) -> int:
    """The kind of a guess by n-gram, after two or three tokens."""
    return LONGEST_MATCH + (num_tokens - 2) * (LONGEST_STREAK + 1) + streak


class Acceptance:
    """The rates of one owner's guesses, and the time that is left for them.

    Also a guess that was not run is compared with the token that came.
    """

    def __init__(self) -> None:
        self.rates = [*_FIRST_LOOKUPS, *_FIRST_NGRAMS, *_FIRST_NGRAMS]
        self._num_seen = [_FIRST_WEIGHT] * NUM_KINDS
        self.num_drafted = 0  # tokens that were run
        self.num_accepted = 0
        self.budget = DraftBudget()

    def note(self, kind: int, *, is_right: bool) -> None:
        """Learns from one guess."""
        self._num_seen[kind] += 1
        weight = max(_FORGETTING, 1 / self._num_seen[kind])
        self.rates[kind] += weight * (is_right - self.rates[kind])


class AcceptanceByOwner(LastSeen[Owner, Acceptance]):
    """The rates of the owners that were seen last; no tenant's texts change what is guessed for another."""

    def __init__(self) -> None:
        super().__init__(Acceptance, _MAX_OWNERS)

    def busiest(self, count: int) -> list[tuple[tuple[str, ...], int, int]]:
        """The adapters with the most tokens drafted, over all tenants: their digests, tokens drafted and accepted."""
        sums: dict[tuple[str, ...], tuple[int, int]] = {}
        for (_, digests), one in self._values.items():
            num_drafted, num_accepted = sums.get(digests, (0, 0))
            sums[digests] = num_drafted + one.num_drafted, num_accepted + one.num_accepted
        drafted = [(digests, *both) for digests, both in sums.items() if both[0]]
        return sorted(drafted, key=lambda item: -item[1])[:count]


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with drafts, all of whose rows decode."""

    num_rows: int
    num_tokens: int  # that it gave: its rows and the guesses that came true
    promise: float  # the logarithm of the gain that was expected
    plain_seconds: float  # that it was expected to take without its drafts
    expected_seconds: float
    seconds: float

    @property
    def error(self) -> float:
        """The logarithm of what it took over what was expected."""
        return math.log(self.seconds / self.expected_seconds)


class DraftTrial:
    """Finds out if guesses pay in steps of about so many rows, by steps without them."""

    def __init__(self) -> None:
        self.is_control = False  # the present step goes without drafts to be compared with those that have some
        self._drafted: deque[DraftedStep] = deque(maxlen=_NUM_KEPT)
        self._plain_errors: deque[float] = deque(maxlen=_NUM_PLAIN_KEPT)
        self._num_since = 0  # steps with drafts since the last verdict
        self._is_sure = False
        self._is_plain_next = False  # on trial: the last step to be compared had drafts
        self._turn = 0
        self._rest = 0  # steps left after a trial that failed
        self._next_rest = _FIRST_REST
        self._hurdle = 0.0  # promises above it end that rest
        self._num_early = 0  # such ends since drafts paid, or the rest was over

    def begin_step(self) -> bool:
        """False if this step goes without drafts, as a control. Asked once a step."""
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self._num_early = 0
            self.is_control = False
        else:
            self._turn += 1
            is_due = self._turn % _CONTROL_EVERY == 0 if self._is_sure else self._is_plain_next
            self.is_control = is_due and bool(self._drafted)
        return not self.is_control

    def may_run(self, promise: float) -> bool:
        """True if drafts that promise so much may be run; such as promise much end the rest after a failed trial."""
        if self._rest > 0 and promise > self._hurdle:
            self._rest = 0
            self._num_early += 1
        return not self._rest

    def observe_plain(self, expected_seconds: float, seconds: float) -> None:
        """Takes in a step that went without drafts to be compared."""
        self._plain_errors.append(math.log(seconds / expected_seconds))
        self._is_plain_next = False

    def observe_drafted(self, step: DraftedStep) -> None:
        self._drafted.append(step)
        self._is_plain_next = True
        self._num_since += 1
        num_pairs = min(len(self._drafted), len(self._plain_errors) + 1)
        if num_pairs >= _LEAST_SAMPLES and self._num_since >= _LEAST_SAMPLES:
            self._judge(*self.log_gain())
        elif _LEAST_FOR_LOSS <= num_pairs < _LEAST_SAMPLES:
            gain, doubt = self.log_gain()
            if gain < -max(_PLAIN_LOSS, _PLAIN_DOUBTS * doubt):
                self._judge(gain, doubt)

    def log_gain(self) -> tuple[float, float]:
        """The logarithm of the tokens per second with drafts over those without, and its standard error."""
        steps = self._drafted
        errors = [step.error for step in steps]
        tokens = [step.num_tokens / step.num_rows for step in steps]
        more = math.log(sum(step.num_tokens for step in steps) / sum(step.num_rows for step in steps))
        longer = math.log(sum(step.expected_seconds for step in steps) / sum(step.plain_seconds for step in steps))
        slower = median(errors) - median(self._plain_errors)
        doubt = math.hypot(
            _error_of_median(errors),
            _error_of_median(self._plain_errors),
            pstdev(tokens) / fmean(tokens) / math.sqrt(len(tokens)),
        )
        return more - longer - slower, doubt

    def _judge(self, gain: float, doubt: float) -> None:
        self._num_since = 0
        if gain > doubt:
            if not self._is_sure:
                self._next_rest = max(_FIRST_REST, self._next_rest // 2)
            self._is_sure, self._num_early = True, 0
        elif gain < -doubt or len(self._drafted) >= _LONGEST_TRIAL:
            broken = fmean(step.promise for step in self._drafted) - gain
            self._hurdle = max(_LEAST_HURDLE, broken + doubt) + _LEAST_HURDLE * self._num_early
            self._is_sure = False
            self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)
            self._drafted.clear()
            self._plain_errors.clear()


class DraftTrials(LastSeen[tuple[str | None, int], DraftTrial]):
    """The trials of steps of 1 row, 2, 3 to 4, 5 to 8, ... of one tenant, each by itself, or of several together.

    So the texts of a tenant decide nothing in steps of another alone. Steps of several share one verdict.
    """

    def __init__(self) -> None:
        super().__init__(DraftTrial, _MAX_TRIALS)

    def of_step(self, tenants: Collection[str], num_rows: int) -> DraftTrial:
        """The trial in steps of so many rows of these tenants."""
        return self.of((next(iter(tenants)) if len(tenants) == 1 else None, (num_rows - 1).bit_length()))


def _error_of_median(values: deque[float] | list[float]) -> float:
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values) / math.sqrt(len(values))
