"""Drafts of the rows of a step: how many guesses of each pay, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lora_serve.core.batch import StepLoad
from lora_serve.core.setting_types import MAX_DRAFT
from lora_serve.core.stats import AdapterSpeculation, SpeculationStats
from lora_serve.engine.batching.step_cost import StepCost
from lora_serve.engine.scheduling.continuation import Ends
from lora_serve.engine.scheduling.step_rows import StepRows
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.speculation.acceptance import AcceptanceByAdapter
from lora_serve.engine.speculation.drafter import Drafter
from lora_serve.engine.speculation.habits import HabitsByOwner

_READ_PER_ROW, _READ_PER_STEP = 1024, 4096  # tokens that a step takes into indexes: about a millisecond
_NUM_SWEEPS = 3  # of Dinkelbach's iteration; it converges faster than linearly
_LEAST_GAIN = 1.02  # of tokens per second: rates and costs are estimates
_NUM_SHOWN = 8  # adapters


@dataclass(slots=True)
class _Candidate:
    """One row that may have a draft."""

    sequence: Sequence
    drafter: Drafter
    seconds: float  # for one more of its tokens
    rates: list[float]  # of each guess: that it and those before it come true

    def count(self, price: float) -> int:
        """The guesses that are worth their time at `price` tokens a second."""
        least = price * self.seconds
        return next((i for i, rate in enumerate(self.rates) if rate <= least), len(self.rates))


class Drafting:
    """Chooses drafts so that a step gives the most tokens per second.

    A guess that comes true with probability p is worth p tokens and costs c seconds; the step without drafts gives n
    tokens in t seconds. The most (n + sum p) / (t + sum c) is that of all guesses with p / c above it: a fractional
    program, solved by Dinkelbach's iteration (On nonlinear fractional programming, 1967). So where rows are many or
    guesses poor, there are none.
    """

    def __init__(self, setting: str, cost: StepCost, ends: Ends) -> None:
        """`setting`: "auto", "off" or the number of tokens of every draft."""
        self._is_auto = setting == "auto"
        self._most = 0 if setting == "off" else MAX_DRAFT if self._is_auto else int(setting)
        self._cost = cost
        self._ends = ends
        self._acceptance = AcceptanceByAdapter()
        self._habits = HabitsByOwner()
        self._num_drafts = 0
        self._num_drafted = 0
        self._accepted_by_place = [0] * self._most

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def choose(self, running: Iterable[Sequence], rows: StepRows) -> list[tuple[Sequence, tuple[int, ...]]]:
        """The drafts that pay in this step, beside its rows so far; none is empty."""
        if not self._most or rows.budget <= 0:
            return []
        decoding = [sequence for sequence in running if _continues(sequence, rows)]
        awake = [(s, drafter) for s in decoding if not (drafter := s.drafter or self._begin(s)).rests()]
        if not awake:
            return []
        num_kv = sum(len(sequence.token_ids) for sequence in decoding)
        load = StepLoad(len(decoding), len(decoding), rows.load.num_adapters, num_kv, num_kv)
        seconds = self._cost.seconds(load)
        price = len(decoding) / seconds if self._is_auto else 0.0
        candidates = self._candidates(awake, price, rows.budget)
        price = self._best_price(candidates, len(decoding), seconds) if self._is_auto else price
        counted = ((candidate, candidate.count(price)) for candidate in candidates)
        return [(candidate.sequence, candidate.drafter.take(count)) for candidate, count in counted if count]

    def learn(self, sequence: Sequence, num_before: int, num_drafted: int, num_accepted: int, *, is_last: bool) -> None:
        """Takes in the tokens that a step brought to the `num_before` that were known, and how its guesses did."""
        drafter = sequence.drafter
        if drafter is None:
            return
        drafter.learn(num_before, is_last=is_last)
        if num_drafted:
            self._num_drafts += 1
            self._num_drafted += num_drafted
            drafter.acceptance.num_drafted += num_drafted
            drafter.acceptance.num_accepted += num_accepted
            for place in range(num_accepted):
                self._accepted_by_place[place] += 1

    def stats(self) -> SpeculationStats:
        busiest = self._acceptance.busiest(_NUM_SHOWN)
        adapters = [
            AdapterSpeculation(digests, one.num_drafted, one.num_accepted, tuple(round(rate, 3) for rate in one.rates))
            for digests, one in busiest
        ]
        return SpeculationStats(
            self._most,
            self._num_drafts,
            self._num_drafted,
            sum(self._accepted_by_place),
            tuple(self._accepted_by_place),
            tuple(adapters),
        )

    def _candidates(self, awake: list[tuple[Sequence, Drafter]], price: float, budget: int) -> list[_Candidate]:
        found, to_read = [], _READ_PER_STEP
        each = self._cost.coefficients
        per_token, per_pair = 1e-9 + each["draft_token"] + each["kv_token"], each["attended_pair"]
        for sequence, drafter in awake:
            num_known = len(sequence.token_ids)
            left = min(sequence.num_steps_left, self._ends.max_model_len - num_known) - 1
            to_read -= drafter.read(min(to_read, _READ_PER_ROW))
            seconds = per_token + per_pair * num_known
            rates = drafter.draft(min(self._most, left, budget), price * seconds)
            if rates:
                found.append(_Candidate(sequence, drafter, seconds, rates))
        return found

    def _best_price(self, candidates: list[_Candidate], num_tokens: int, seconds: float) -> float:
        """The tokens per second of the best step; infinity if that has no drafts."""
        plain = price = num_tokens / seconds
        fixed = self._cost.coefficients["drafting_step"]
        for _ in range(_NUM_SWEEPS):
            gain, spent = 0.0, fixed
            for candidate in candidates:
                count = candidate.count(price)
                gain += sum(candidate.rates[:count])
                spent += count * candidate.seconds
            price = (num_tokens + gain) / (seconds + spent)
            if price <= _LEAST_GAIN * plain:
                return float("inf")
        return price

    def _begin(self, sequence: Sequence) -> Drafter:
        request, digests = sequence.request, tuple(ref.digest for ref in sequence.refs)
        habits = self._habits.of((request.cache_scope or request.tenant, digests))
        ends = () if request.sampling.ignore_eos else self._ends.eos_token_ids
        ends = (*ends, *request.sampling.stop_token_ids)
        acceptance = self._acceptance.of(digests)
        drafter = Drafter(sequence.token_ids, habits, acceptance, ends, sequence.num_prompt)
        sequence.drafter = drafter
        return drafter


def _continues(sequence: Sequence, rows: StepRows) -> bool:
    """True if the sequence gets a token in this step that is not its first."""
    row = rows.row(sequence.sequence_id)
    return row is not None and row.sample is not None and row.sample.num_output_tokens > 0
