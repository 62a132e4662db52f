"""The cost of a step in seconds, learned from past steps."""

from __future__ import annotations

import math
from operator import add, mul

from lora_serve.core.batch import StepLoad

_NAMES = ("step", "token", "row", "adapter", "kv_token", "attended_pair", "drafting_step", "draft_token")
_FIRST_GUESS = (
    1e-3,
    1.6e-4,
    1e-4,
    1e-4,
    2.5e-7,
    1.5e-8,
    1e-4,
    1.6e-4,  # as much as a prompt's: less has to be seen first
)  # seconds for one of each: what counts is their ratios
_FORGETTING = 0.99  # weight of a step that is one step older
_RIDGE = 0.02  # pulls the coefficients to the ratios of the first guess where the data does not tell them apart
_NUM_SWEEPS = 2
_NUM_FREE = 10  # first observations, whose errors are not bounded: the first guess may be far away
_MAX_RATIO = 3.0  # of an observation to its prediction; a step that was interrupted says nothing of its load
_DRIFT_RATE = 0.1  # of the running mean of the log errors
_MIN_SECONDS = 1e-9  # of a prediction
_MAX_DRIFT = 0.25  # beyond it, the machine has become slower or faster: all coefficients are scaled at once

Vector = list[float]


class _Equations:
    """The normal equations A c = b of the steps so far, newer steps weighing more."""

    def __init__(self) -> None:
        size = len(_NAMES)
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size

    def add(self, x: Vector, target: float) -> None:
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
    """seconds = c . (1, tokens, rows, adapters, KV tokens read, query-key pairs, 1 if there are drafts, their tokens),
    where every c is at least 0.

    Least squares of the relative error with exponential forgetting: the normal equations A c = b are kept, and each
    step moves c by sweeps of coordinate descent that stay at or above 0 (Franc, Hlavac and Navara, Sequential
    coordinate-wise algorithm for the non-negative least squares problem, 2005). Errors are bounded as in Huber's
    estimator. If all predictions err to the same side, the coefficients are scaled and not relearned.
    """

    def __init__(self) -> None:
        self._shares = [1.0] * len(_NAMES)  # of the first guess: c = shares * _FIRST_GUESS
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
        x = _features(load)
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
        equations = (
            self._prompt if load.num_tokens > load.num_rows else self._draft if load.num_drafted else self._decode
        )
        equations.add([value / predicted for value in x], math.exp(log_ratio))
        self._scale += (1 - _FORGETTING) * (math.exp(log_ratio) * predicted / sum(x) - self._scale)
        self._fit()

    def seconds(self, load: StepLoad) -> float:
        return self._predict(_features(load))

    @property
    def seconds_per_token(self) -> float:
        """The cost of one more prompt token."""
        return self.coefficients["token"]

    @property
    def coefficients(self) -> dict[str, float]:
        """The learned seconds for one more of each feature."""
        return {name: share * guess for name, share, guess in zip(_NAMES, self._shares, _FIRST_GUESS, strict=True)}

    @property
    def relative_error(self) -> float | None:
        """The running median of |predicted / observed - 1|, each step predicted before it was observed; None: too
        early.
        """
        return self._error

    def _predict(self, x: Vector) -> float:
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


def _features(load: StepLoad) -> Vector:
    """The features times their first guess: each is in seconds, so that one ridge fits all."""
    return [
        _FIRST_GUESS[0],
        _FIRST_GUESS[1] * load.num_tokens,
        _FIRST_GUESS[2] * load.num_rows,
        _FIRST_GUESS[3] * load.num_adapters,
        _FIRST_GUESS[4] * load.num_kv_read,
        _FIRST_GUESS[5] * load.num_attended,
        _FIRST_GUESS[6] * (load.num_drafted > 0),
        _FIRST_GUESS[7] * load.num_drafted,
    ]


def _sum(a: Vector, b: Vector, c: Vector) -> Vector:
    return list(map(add, map(add, a, b), c))


def _dot(a: Vector, b: Vector) -> float:
    total: float = sum(map(mul, a, b))
    return total
