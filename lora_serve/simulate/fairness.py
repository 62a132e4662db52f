"""Fairness among accounts that compete for a replica, measured in windows.

Service is counted as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): an input token counts 1,
an output token 2, divided by the account's weight. An account is backlogged in a window if at every look during the
window one of its requests waited that could have run. Prompts count in the window of their first token.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
WINDOW = 5.0  # seconds
_LOOKS = 10  # per window


@dataclass(frozen=True, slots=True)
class Fairness:
    """The figures of all windows in which at least two accounts were backlogged."""

    num_windows: int = 0
    max_service_gap: float = 0.0  # weighted tokens between the best and the worst served, in the worst window
    median_service_gap: float = 0.0
    jain: float = 1.0  # mean over the windows of Jain's index: 1 is equal, 1/n is one of n gets all


@dataclass(frozen=True, slots=True)
class _Window:
    gap: float
    jain: float


class FairnessMeter:
    """Measures one replica."""

    def __init__(self, weights: Mapping[str, float] | None = None, window: float = WINDOW) -> None:
        self._weights = dict(weights or {})
        self._length = window
        self._ends = window
        self._next_look = 0.0
        self._service: dict[str, float] = defaultdict(float)
        self._backlogged: set[str] | None = None  # None: not looked at yet
        self.windows: list[_Window] = []

    def is_due(self, now: float) -> bool:
        """True if the next look is due."""
        return now >= self._next_look

    def look(self, waiting: Iterable[str], now: float) -> None:
        """Takes in the accounts that have waiting requests which could run."""
        if now >= self._ends:
            self._close()
            self._ends = (now // self._length + 1) * self._length
        self._backlogged = set(waiting) if self._backlogged is None else self._backlogged & set(waiting)
        self._next_look = now + self._length / _LOOKS

    def served(self, account: str, tokens: float) -> None:
        """Counts so many weighted tokens."""
        self._service[account] += tokens

    def _close(self) -> None:
        accounts = sorted(self._backlogged or ())
        if len(accounts) > 1:
            services = [self._service[account] / self._weights.get(account, 1.0) for account in accounts]
            self.windows.append(_Window(max(services) - min(services), jain_index(services)))
        self._service.clear()
        self._backlogged = None


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2) (Jain, Chiu, Hawe, 1984); 1 if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness_of(meters: Iterable[FairnessMeter]) -> Fairness:
    """The fairness of a fleet."""
    windows = [window for meter in meters for window in meter.windows]
    if not windows:
        return Fairness()
    gaps = [window.gap for window in windows]
    jain = statistics.fmean(window.jain for window in windows)
    return Fairness(len(windows), max(gaps), statistics.median(gaps), jain)
