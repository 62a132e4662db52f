"""Keeps p95 targets: sizes steps for the inter-token time, and the wait window for the time to first token.

Both combine feedforward and feedback. Forward: the learned cost of a step tells how many tokens and rows fit into a
budget of seconds. Back: the budget is a share of the target that follows the measured quantile (Robbins and Monro, A
stochastic approximation method, 1951): a late token lowers the share by 0.95 of a rate, any other raises it by 0.05,
so that the share settles where one token in twenty is late, which is what a p95 at the target means.

The admin's limits are maxima that the controller never exceeds, the window included. Rows and tokens that hardly
lengthen a step are always admitted: where the fixed part of a step or other programs cause the delay, small steps
would not help and would cost throughput. Targets below about 2.4 steps of one row are therefore not kept under load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from lora_serve.core.batch import StepLoad
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.engine.batching.step_cost import StepCost

_NUM_KEPT = 512
LATE_SHARE = 0.05  # 1 - 0.95
_AIM = 0.97  # of a target: the quantile swings a little around where it rests
_RATE = 0.1
_MIN_SHARE, _FIRST_SHARE, _MAX_SHARE = 0.5, 0.9, 1.25  # of the inter-token target that a step is sized for
_BINDING = 0.75  # of its budget: a shorter step would not have been longer with a larger budget
_UNRELATED = 3.0  # a step predicted so many times shorter than the target was late for another reason than its size
_MIN_CHUNK = 16  # tokens of prompts in a step, whatever the target, so that they come to an end
_DECODE_PART = 0.75  # of a step at most, so that prompts, which bring new rows, have the rest
_CHEAP_ROWS = 2.0  # times a step of one row: rows that fit into it are at least half of the throughput
_CHEAP_CHUNK = 1.2  # times a step without prompts: likewise tokens of prompts
_MIN_ROW_SHARE = 0.75  # of the inter-token target, for rows
_PROBE_EVERY = 50  # steps: 2 of the 5 in 100 that may be late are for learning what larger ones cost
_PROBE_SIZE = 4  # times the limit of the others
_MIN_STEPS = 16  # observed before the learned cost is used
_MIX_FORGETTING = 0.998


class RecentTimes:
    """The last 512 times of one kind, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """The 95th percentile by nearest rank; None while nothing was measured."""
        ordered = sorted(self._seconds)
        return ordered[int(0.95 * (len(ordered) - 1) + 0.5)] if ordered else None


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_rows: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Running:
    """The work that a step has to do in any case."""

    num_rows: int = 0
    num_decoding: int = 0  # of these: rows that wait for their next token
    num_kv: int = 0  # cached tokens, summed over the rows
    num_started: int = 0  # cached tokens of the longest prompt that is under way
    num_adapters: int = 0
    num_waiting: int = 0  # rows that may join, in this step or soon


class LatencyController:
    """Turns measured times and loads into limits; no clock and no side effects."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.ttft, self.itl = RecentTimes(), RecentTimes()
        self._step_share = _FIRST_SHARE  # of the inter-token target
        self._window_share = 0.5  # of the target of the first token
        self._num_gaps = self._num_late = 0  # of the step that has just run
        self._mean_gaps = 1.0
        self._mix = [1.0, 0.0, 0.0]  # sums of rows, adapters and KV read, older steps weighing less

    def observe_first_token(self, seconds: float, limits: BatchLimits) -> None:
        self.ttft.add(seconds)
        if limits.ttft_target is not None:
            is_late = seconds > _AIM * limits.ttft_target
            self._window_share += _RATE * (LATE_SHARE - is_late)
            self._window_share = min(1.0, max(0.0, self._window_share))

    def observe_token(self, seconds: float, limits: BatchLimits) -> None:
        self.itl.add(seconds)
        if limits.itl_target is not None:
            self._num_gaps += 1
            self._num_late += seconds > _AIM * limits.itl_target

    def observe_step(self, load: StepLoad, seconds: float, limits: BatchLimits) -> None:
        """Learns from a step, after the tokens that it produced were observed."""
        facts = (load.num_rows, load.num_adapters, load.num_kv_read)
        self._mix = [_MIX_FORGETTING * total + fact for total, fact in zip(self._mix, facts, strict=True)]
        if limits.itl_target is not None and self._num_gaps > 0:
            self._correct(self._cost.seconds(load), seconds, limits.itl_target)
        self._num_gaps = self._num_late = 0

    def _correct(self, predicted: float, seconds: float, target: float) -> None:
        self._mean_gaps += 0.02 * (self._num_gaps - self._mean_gaps)
        weight = min(2.0, self._num_gaps / max(1.0, self._mean_gaps))  # the quantile is one of tokens, not of steps
        late = self._num_late / self._num_gaps
        is_binding = seconds >= _BINDING * self._step_share * target
        if (late > LATE_SHARE and predicted * _UNRELATED >= target) or (late <= LATE_SHARE and is_binding):
            share = self._step_share * math.exp(_RATE * weight * (LATE_SHARE - late))
            self._step_share = min(_MAX_SHARE, max(_MIN_SHARE, share))

    def step_limits(self, limits: BatchLimits, running: Running) -> StepLimits:
        """Rows and tokens that keep the inter-token target; without one the maxima. Running rows keep their token."""
        rows, tokens = limits.max_num_seqs, max(limits.max_num_batched_tokens, running.num_rows)
        if self._cost.num_observed < _MIN_STEPS:
            return StepLimits(rows, tokens)
        if limits.itl_target is None:
            return StepLimits(rows, self._tokens_for_stretch(limits, tokens, running))
        budget = self._step_share * limits.itl_target
        for_rows = max(budget, _MIN_ROW_SHARE * limits.itl_target)
        return StepLimits(self._rows_within(for_rows, rows), self._tokens_within(budget, tokens, running))

    def window(self, limits: BatchLimits, num_rows: int, num_tokens: int) -> float:
        """Seconds that the window may stay open after the first of so many waiting rows with so many tokens in all."""
        if limits.ttft_target is None or limits.batch_wait == 0:
            return limits.batch_wait
        mix = StepLoad(num_tokens, num_rows, min(num_rows, round(num_rows * self._per_row(1))), num_tokens)
        slack = _AIM * limits.ttft_target - self._cost.seconds(mix)
        return max(0.0, min(limits.batch_wait, self._window_share * limits.ttft_target, slack))

    def _rows_within(self, budget: float, most: int) -> int:
        budget = max(_DECODE_PART * budget, _CHEAP_ROWS * self._seconds_with_rows(1))
        return max(1, bisect_right(range(1, most + 1), budget, key=self._seconds_with_rows))

    def _tokens_within(self, budget: float, most: int, running: Running) -> int:
        """All tokens there may be while no row waits for its next one.

        Now and then a step is larger: if all steps were alike, an error in their learned cost would never be corrected.
        """
        if not running.num_decoding:
            return most
        budget = max(budget, _CHEAP_CHUNK * self._seconds_with_tokens(running.num_rows, running))
        found = self._most_tokens(budget, most, running)
        is_probe = self._cost.num_observed % _PROBE_EVERY == 0
        return min(most, _PROBE_SIZE * found) if is_probe else found

    def _tokens_for_stretch(self, limits: BatchLimits, most: int, running: Running) -> int:
        """Prompts may lengthen a step to a multiple of its time with all rows decoding."""
        if limits.prompt_stretch == 0 or not running.num_decoding:
            return most
        rows = min(limits.max_num_seqs, running.num_rows + running.num_waiting)
        budget = limits.prompt_stretch * self._seconds_with_rows(rows)
        return self._most_tokens(budget, most, running)

    def _most_tokens(self, budget: float, most: int, running: Running) -> int:
        """The tokens that fit into `budget` seconds, with at least _MIN_CHUNK prompt tokens."""
        least = min(most, running.num_rows + _MIN_CHUNK)
        counts = range(least + 1, most + 1)
        return least + bisect_right(counts, budget, key=lambda count: self._seconds_with_tokens(count, running))

    def _per_row(self, index: int) -> float:
        return self._mix[index] / max(1.0, self._mix[0])

    def _seconds_with_rows(self, num_rows: int) -> float:
        """The cost of a step in which so many rows decode and nothing else runs."""
        num_kv = round(num_rows * self._per_row(2))
        num_adapters = min(num_rows, round(num_rows * self._per_row(1)))
        return self._cost.seconds(StepLoad(num_rows, num_rows, num_adapters, num_kv, num_kv))

    def _seconds_with_tokens(self, num_tokens: int, running: Running) -> float:
        """The cost of a step of all running rows that fills up its tokens from prompts."""
        chunk = num_tokens - running.num_rows
        pairs = chunk * running.num_started + chunk * (chunk + 1) // 2
        num_kv = running.num_kv + running.num_rows
        load = StepLoad(
            num_tokens, running.num_rows + 1, running.num_adapters + 1, num_kv + chunk + running.num_started,
            num_kv + pairs,
        )  # fmt: skip
        return self._cost.seconds(load)


def reason_of(
    limits: BatchLimits, step: StepLimits, window: float, ttft_p95: float | None, itl_p95: float | None
) -> str:
    """Explains the limits in force, as in "smaller steps: between tokens 61 ms (p95), above the target of 50 ms"; one
    part per target, joined by "; ".
    """
    parts = [_of_itl(limits, step, itl_p95), _of_ttft(limits, window, ttft_p95)]
    return "; ".join(part for part in parts if part) or "no target is set: the limits are in force as they are"


def _of_itl(limits: BatchLimits, step: StepLimits, p95: float | None) -> str:
    if limits.itl_target is None:
        return ""
    is_tight = step.max_rows < limits.max_num_seqs or step.max_tokens < limits.max_num_batched_tokens
    what = f"between tokens {_against(p95, limits.itl_target)}"
    if not is_tight:
        return f"full steps: {what}"
    is_missed = p95 is not None and p95 > limits.itl_target
    return f"{'smaller steps' if is_missed else 'steps kept smaller'}: {what}"


def _of_ttft(limits: BatchLimits, window: float, p95: float | None) -> str:
    if limits.ttft_target is None:
        return ""
    what = f"first tokens {_against(p95, limits.ttft_target)}"
    if limits.batch_wait == 0:
        return f"no wait for a fuller batch: {what}"
    is_shorter = window < limits.batch_wait
    return f"wait for a fuller batch {'shortened to' if is_shorter else 'up to'} {_shown(window)}: {what}"


def _against(p95: float | None, target: float) -> str:
    if p95 is None:
        return f"not measured yet, the target is {_shown(target)}"
    return f"{_shown(p95)} (p95), {'above' if p95 > target else 'within'} the target of {_shown(target)}"


def _shown(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
