"""Quantiles of recent times, and tokens of the last second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate

from lora_serve.console.live.frames import Percentiles, TokenRate

_PER_E = 20  # buckets for each factor of e: a quantile is right to 2.5 percent
_SMALLEST = 0.01  # ms, and less
_NUM_BUCKETS = 400  # up to about 80 minutes
_FORGOTTEN = 0.3  # a count that has faded to this is none
_LONG_PAUSE = 60  # seconds


class RecentTimes:
    """Times in milliseconds, of which older ones weigh less."""

    def __init__(self, kept: float) -> None:
        """`kept`: the part of a count that is left a second later."""
        self._counts = [0.0] * _NUM_BUCKETS
        self._kept = kept
        self._faded_at = math.inf

    def add(self, ms: float, count: int = 1) -> None:
        """Counts a time."""
        bucket = int(_PER_E * math.log(ms / _SMALLEST)) if ms > _SMALLEST else 0
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += count

    def fade(self, now: float) -> None:
        """Lets what was counted weigh less, by whole seconds."""
        self._faded_at = min(self._faded_at, now)
        seconds = int(now - self._faded_at)
        if seconds > 0:
            self._faded_at += seconds
            share = self._kept**seconds if seconds < _LONG_PAUSE else 0.0
            self._counts = [count * share if count * share > _FORGOTTEN else 0.0 for count in self._counts]

    def percentiles(self) -> Percentiles:
        """The median and the 95th percentile."""
        up_to = list(accumulate(self._counts))
        if not up_to[-1]:
            return Percentiles(None, None)
        return Percentiles(*(_middle(bisect_left(up_to, share * up_to[-1])) for share in (0.5, 0.95)))


class LastSecond:
    """Tokens of steps that ended within the last second."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()
        self._prompt = self._output = 0

    def add(self, time: float, prompt: int, output: int) -> None:
        """Counts the tokens of a step."""
        self._steps.append((time, prompt, output))
        self._prompt += prompt
        self._output += output

    def rate(self, now: float) -> TokenRate:
        """The tokens of the second before `now`. Steps of a second later are forgotten: the clock was set back."""
        while self._steps and abs(now - self._steps[0][0]) >= 1:
            _, prompt, output = self._steps.popleft()
            self._prompt -= prompt
            self._output -= output
        return TokenRate(self._prompt, self._output)


def _middle(bucket: int) -> float:
    return round(_SMALLEST * math.exp((bucket + 0.5) / _PER_E), 3)
