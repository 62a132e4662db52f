"""How long a step will take, learned from past ones."""

from __future__ import annotations

from lora_serve.core.batch import StepLoad

_FORGETTING = 0.998  # weight of a step that is one step older
_RIDGE = 1e-2  # of the start: the coefficients stay near their first guess until data says otherwise
_SCALES = (1.0, 64.0, 8.0, 8.0, 4096.0)  # of the features, so that one ridge fits all
_FIRST_GUESS = (1e-3, 1e-2, 1e-3, 1e-3, 1e-3)  # seconds per scaled feature
_MAX_COVARIANCE = 1e6  # what is never seen would let forgetting grow it without end

Vector = list[float]


class StepCost:
    """seconds = c . (1, tokens, rows, adapters, KV tokens read), by recursive least squares with forgetting.

    (Ljung, System Identification, 1999, section 11.2.) Coefficients below zero, which noise can give, count as zero.
    """

    def __init__(self) -> None:
        self._coefficients = list(_FIRST_GUESS)
        size = len(_SCALES)
        self._covariance = [[1 / _RIDGE if i == j else 0.0 for j in range(size)] for i in range(size)]
        self.num_observed = 0

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took `seconds`."""
        x = _features(load)
        gain = [sum(p * value for p, value in zip(row, x, strict=True)) for row in self._covariance]
        scale = _FORGETTING + sum(a * b for a, b in zip(x, gain, strict=True))
        error = seconds - sum(a * b for a, b in zip(self._coefficients, x, strict=True))
        self._coefficients = [c + g * error / scale for c, g in zip(self._coefficients, gain, strict=True)]
        self._covariance = [
            [min((p - gi * gj / scale) / _FORGETTING, _MAX_COVARIANCE) for p, gj in zip(row, gain, strict=True)]
            for row, gi in zip(self._covariance, gain, strict=True)
        ]
        self.num_observed += 1

    def seconds(self, load: StepLoad) -> float:
        """Of one step."""
        return sum(max(0.0, c) * x for c, x in zip(self._coefficients, _features(load), strict=True))

    @property
    def seconds_per_token(self) -> float:
        """That one more token of a prompt costs."""
        return max(0.0, self._coefficients[1]) / _SCALES[1]


def _features(load: StepLoad) -> Vector:
    facts = (1, load.num_tokens, load.num_rows, load.num_adapters, load.num_kv_read)
    return [fact / scale for fact, scale in zip(facts, _SCALES, strict=True)]
