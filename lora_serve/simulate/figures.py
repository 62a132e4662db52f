"""A record of every request, from the engines' events, and the fairness among accounts that compete for a replica.

Service is counted in windows as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): an input
token counts 1, an output token 2, divided by the account's weight. An account is backlogged in a window if at every
look during the window one of its requests waited that could have run. Prompts count in the window of their first token.
"""

from __future__ import annotations

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_serve.core.messages import ErrorEvent, FinishEvent, PromptEvent, StepEvent, TokenEvent
from lora_serve.simulate.workload import Arrival

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
        return now >= self._next_look

    def look(self, waiting: Iterable[str], now: float) -> None:
        """Takes in the accounts that have waiting requests which could run."""
        if now >= self._ends:
            self._close()
            self._ends = (now // self._length + 1) * self._length
        self._backlogged = set(waiting) if self._backlogged is None else self._backlogged & set(waiting)
        self._next_look = now + self._length / _LOOKS

    def served(self, account: str, tokens: float) -> None:
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
    windows = [window for meter in meters for window in meter.windows]
    if not windows:
        return Fairness()
    gaps = [window.gap for window in windows]
    jain = statistics.fmean(window.jain for window in windows)
    return Fairness(len(windows), max(gaps), statistics.median(gaps), jain)


@dataclass(slots=True)
class SimulatedRequest:
    """A request that is under way or has ended. Times are seconds."""

    index: int
    group: str
    account: str
    replica: int
    arrival: float
    num_prompt: int
    first_token: float | None = None  # None: it has none, or ended before
    end: float = 0.0  # until then the time of its last token
    num_cached: int = 0
    num_output: int = 0
    error: str | None = None  # its class; None: it ended well


class RequestRecorder:
    """`num_warm`: the first so many requests count in the totals, but not in the gaps between tokens."""

    def __init__(self, num_replicas: int, num_warm: int = 0, weights: Mapping[str, float] | None = None) -> None:
        self.outcomes: list[SimulatedRequest] = []
        self.gaps = array("d")
        self.meters = [FairnessMeter(weights) for _ in range(num_replicas)]
        self._num_warm = num_warm
        self._open: dict[str, SimulatedRequest] = {}

    @property
    def open_requests(self) -> list[str]:
        return list(self._open)

    def submitted(self, arrival: Arrival, replica: int) -> None:
        self._open[str(arrival.index)] = SimulatedRequest(
            arrival.index, arrival.group, arrival.adapter.tenant, replica, arrival.time, arrival.num_prompt
        )

    def take(self, event: StepEvent, now: float) -> bool:
        """Takes in an event; True if it ends its request."""
        record = self._open[event.request_id]
        if isinstance(event, TokenEvent):
            self._token(record, now)
        elif isinstance(event, PromptEvent):
            record.num_cached = event.num_cached_tokens
            computed = record.num_prompt - record.num_cached
            self.meters[record.replica].served(record.account, INPUT_WEIGHT * computed)
        elif isinstance(event, FinishEvent | ErrorEvent):
            record.end = now
            record.error = type(event.error).__name__ if isinstance(event, ErrorEvent) else None
            self.outcomes.append(self._open.pop(event.request_id))
            return True
        return False

    def _token(self, record: SimulatedRequest, now: float) -> None:
        if record.first_token is None:
            record.first_token = now
        elif record.index >= self._num_warm:
            self.gaps.append(now - record.end)
        record.end = now
        record.num_output += 1
        self.meters[record.replica].served(record.account, OUTPUT_WEIGHT)
