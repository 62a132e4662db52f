"""The cost of a step in seconds, learned from past steps, and steps and wait windows sized by it to keep p95 targets.

Targets are kept by feedforward and feedback. Forward: the learned cost of a step tells how many tokens and rows fit
into a budget of seconds. Back: the budget is a share of the target that follows the measured quantile (Robbins and
Monro, A stochastic approximation method, 1951): a late token lowers the share by 0.95 of a rate, any other raises it by
0.05, so that the share settles where one token in twenty is late, which is what a p95 at the target means.

The admin's limits are maxima that the controller never exceeds, the window included. Rows and tokens that hardly
lengthen a step are always admitted: where the fixed part of a step or other programs cause the delay, small steps
would not help and would cost throughput. Targets below about 2.4 steps of one row are therefore not kept under load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import add, mul

from lora_serve.core.batch import StepLoad
from lora_serve.core.setting_groups.engine import BatchLimits

_Features = list[float]
# Seconds for one of each: what counts is their ratios. A guess costs as much as a prompt's token: less has to be seen.
# On a CPU, nothing but its tokens tells a step with prompts from others.
_FIRST_GUESS = {
    "step": 1e-3, "token": 1.6e-4, "row": 1e-4, "adapter": 1e-4, "kv_token": 2.5e-7, "attended_pair": 1.5e-8,
    "prompt_step": 0.0, "drafting_step": 1e-4, "draft_token": 1.6e-4,
}  # fmt: skip
# By the steps of an 8B model on an H200 (benchmarks/results/gpu-step.json): the bytes of the weights are the step, a
# token costs little, and a step that is no captured graph costs several of the others.
_FIRST_GUESS_ON_CUDA = {
    "step": 7.6e-3, "token": 3.3e-5, "row": 4e-5, "adapter": 4e-5, "kv_token": 7e-8, "attended_pair": 1e-10,
    "prompt_step": 3e-2, "drafting_step": 3e-2, "draft_token": 3.3e-5,
}  # fmt: skip
_FORGETTING = 0.99  # weight of a step that is one step older
_RIDGE = 0.02  # pulls the coefficients to the ratios of the first guess where the data does not tell them apart
_NUM_SWEEPS = 2
_NUM_FREE = 10  # first observations, whose errors are not bounded: the first guess may be far away
_MAX_RATIO = 3.0  # of an observation to its prediction; a step that was interrupted says nothing of its load
_DRIFT_RATE = 0.1  # of the running mean of the log errors
_MIN_SECONDS = 1e-9  # of a prediction
_MAX_DRIFT = 0.25  # beyond it, the machine has become slower or faster: all coefficients are scaled at once
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


class _Equations:
    """The normal equations A c = b of the steps so far, newer steps weighing more."""

    def __init__(self) -> None:
        size = len(_FIRST_GUESS)
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size

    def add(self, x: _Features, target: float) -> None:
        self.matrix = [
            [_FORGETTING * a + value * b for a, b in zip(row, x, strict=True)]
            for row, value in zip(self.matrix, x, strict=True)
        ]
        self.vector = [_FORGETTING * b + value * target for b, value in zip(self.vector, x, strict=True)]

    def rescale(self, factor: float) -> None:
        """Changes the equations as if every c were `factor` times as large; the weights are 1 / seconds ** 2."""
        self.matrix = [[a / factor**2 for a in row] for row in self.matrix]
        self.vector = [b / factor for b in self.vector]


class StepCost:
    """seconds = c . (1, tokens, rows, adapters, KV tokens read, query-key pairs, 1 if there are prompts, 1 if there are
    drafts, their tokens), where every c is at least 0.

    1 if there are prompts: where steps are captured as graphs, if they have too many tokens for one. Such a step costs
    the launches of its kernels, however few the tokens are.

    Least squares of the relative error with exponential forgetting: the normal equations A c = b are kept, and each
    step moves c by sweeps of coordinate descent that stay at or above 0 (Franc, Hlavac and Navara, Sequential
    coordinate-wise algorithm for the non-negative least squares problem, 2005). Errors are bounded as in Huber's
    estimator. If all predictions err to the same side, the coefficients are scaled and not relearned.
    """

    def __init__(self, device: str = "cpu", captured_tokens: int = 0) -> None:
        self._captured_tokens = captured_tokens
        self._guess = _FIRST_GUESS_ON_CUDA if device.startswith("cuda") else _FIRST_GUESS
        self._shares = [1.0] * len(self._guess)  # of the first guess: c = shares * guess
        # Apart, so that hours of one kind do not erase the others:
        self._decode, self._prompt, self._draft = _Equations(), _Equations(), _Equations()
        self._scale = 1.0  # what all shares would be if the first guess had the right ratios
        self._drift = 0.0
        self._error: float | None = None
        self.num_observed = 0

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from a step of this load that took `seconds`."""
        if seconds <= 0:
            return
        x = self._features(load)
        log_ratio = math.log(seconds / self._predict(x))
        if self.num_observed >= _NUM_FREE:
            bound = math.log(_MAX_RATIO)
            log_ratio = max(-bound, min(bound, log_ratio))
            self._note_error(abs(math.exp(-log_ratio) - 1))
        self._drift += max(_DRIFT_RATE, 1 / (self.num_observed + 1)) * (log_ratio - self._drift)
        if abs(self._drift) > _MAX_DRIFT:
            log_ratio -= self._drift
            self._rescale(math.exp(self._drift))
        self.num_observed += 1
        predicted = self._predict(x)
        equations = self._prompt if load.num_prompt_tokens else self._draft if load.num_drafted else self._decode
        equations.add([value / predicted for value in x], math.exp(log_ratio))
        self._scale += (1 - _FORGETTING) * (math.exp(log_ratio) * predicted / sum(x) - self._scale)
        self._fit()

    def seconds(self, load: StepLoad) -> float:
        return self._predict(self._features(load))

    @property
    def seconds_per_token(self) -> float:
        """The cost of one more prompt token."""
        return self.coefficients["token"]

    @property
    def seconds_of_prompts(self) -> float:
        """The cost of any prompt in a step, however few its tokens are."""
        return 0.0 if self._captured_tokens else self.coefficients["prompt_step"]

    @property
    def coefficients(self) -> dict[str, float]:
        """The learned seconds for one more of each feature."""
        return dict(zip(self._guess, map(mul, self._shares, self._guess.values()), strict=True))

    @property
    def relative_error(self) -> float | None:
        """The running median of |predicted / observed - 1|, each step predicted before it was observed; None: too
        early.
        """
        return self._error

    def _predict(self, x: _Features) -> float:
        return max(_MIN_SECONDS, _dot(self._shares, x))

    def _rescale(self, factor: float) -> None:
        """Changes the estimate as if every step so far had taken `factor` times as long."""
        self._shares = [factor * share for share in self._shares]
        self._decode.rescale(factor)
        self._prompt.rescale(factor)
        self._draft.rescale(factor)
        self._scale *= factor
        self._drift = 0.0

    def _fit(self) -> None:
        """Moves the shares towards least squares over all steps, none below zero, held near the first guess by a ridge.

        In place, by coordinate descent.
        """
        shares, ridge = self._shares, _RIDGE / self._scale**2
        kinds = (self._decode, self._prompt, self._draft)
        matrix = [_sum(*rows) for rows in zip(*(kind.matrix for kind in kinds), strict=True)]
        vector = _sum(*(kind.vector for kind in kinds))
        for _ in range(_NUM_SWEEPS):
            for i, row in enumerate(matrix):
                descent = vector[i] - _dot(row, shares) + ridge * (self._scale - shares[i])
                shares[i] = max(0.0, shares[i] + descent / (row[i] + ridge))

    def _note_error(self, error: float) -> None:
        """A running median: a step up for a larger error, a step down for a smaller one (Robbins and Monro, 1951)."""
        if self._error is None:
            self._error = error
        else:
            self._error = max(0.0, self._error + (0.005 if error > self._error else -0.005))

    def _features(self, load: StepLoad) -> _Features:
        """The features times their first guess: each is in seconds, so that one ridge fits all."""
        counts = (
            1, load.num_tokens, load.num_rows, load.num_adapters, load.num_kv_read, load.num_attended,
            load.num_prompt_tokens > self._captured_tokens, load.num_drafted > 0, load.num_drafted,
        )  # fmt: skip
        return list(map(mul, counts, self._guess.values()))


def _sum(a: _Features, b: _Features, c: _Features) -> _Features:
    return list(map(add, map(add, a, b), c))


def _dot(a: _Features, b: _Features) -> float:
    total: float = sum(map(mul, a, b))
    return total


class LatencyWindow:
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
        self.ttft, self.itl = LatencyWindow(), LatencyWindow()
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
        without = self._seconds_with_tokens(running.num_rows, running)
        budget = max(budget, _CHEAP_CHUNK * (without + self._cost.seconds_of_prompts))
        found = self._most_tokens(budget, most, running)
        is_probe = self._cost.num_observed % _PROBE_EVERY == 0
        return min(most, _PROBE_SIZE * found) if is_probe else found

    def _tokens_for_stretch(self, limits: BatchLimits, most: int, running: Running) -> int:
        """Prompts may lengthen a step to a multiple of its time with all rows decoding, and of what it costs to have
        any prompt in it: that is paid however few tokens they are, so that fewer would only come to more such steps.
        """
        if limits.prompt_stretch == 0 or not running.num_decoding:
            return most
        rows = min(limits.max_num_seqs, running.num_rows + running.num_waiting)
        budget = limits.prompt_stretch * (self._seconds_with_rows(rows) + self._cost.seconds_of_prompts)
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
