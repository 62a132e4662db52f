"""The ends of a request to a neighbour, and their count in /metrics."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class Outcome(enum.StrEnum):
    """The end of a request to a neighbour. All but the first two and `BROKEN` streams are computed here then."""

    ANSWERED = "answered"
    LEFT = "left"  # the caller went away
    UNREACHABLE = "unreachable"  # no connection
    SLOW = "slow"  # no token in time
    BUSY = "busy"  # 429 or 503
    UNKNOWN_MODEL = "unknown_model"  # 404, or another version of the adapter
    FORBIDDEN = "forbidden"  # 401 or 403
    REFUSED = "refused"  # another status below 500
    FAILED = "failed"  # another status from 500 on, or an error in its stream
    GARBLED = "garbled"  # an answer that makes no sense
    BROKEN = "broken"  # it ended in the middle


class NeighbourError(Exception):
    """A neighbour has not answered; `str(error)` holds nothing of what was asked, nor of what came back."""

    def __init__(self, outcome: Outcome, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry_after = retry_after  # seconds; 0: it said nothing of them


class OverflowMetrics:
    """Counts by neighbour. Neighbours are named by the settings only, so that nobody can grow the series."""

    def __init__(self, registry: CollectorRegistry, neighbours: Mapping[str, Callable[[], float]]) -> None:
        """`neighbours`: by name, 1 if it may be asked and 0 if not."""
        self._requests = Counter(
            "lora_serve_overflow_requests",
            "Rows that a neighbour was asked for, by what became of them.",
            ["neighbour", "outcome"],
            registry=registry,
        )
        up = Gauge(
            "lora_serve_overflow_neighbour_up",
            "0 while the neighbour is left alone, as it has failed.",
            ["neighbour"],
            registry=registry,
        )
        for name, is_up in neighbours.items():
            for outcome in Outcome:
                self._requests.labels(name, outcome)
            up.labels(name).set_function(is_up)

    def count(self, neighbour: str, outcome: Outcome) -> None:
        self._requests.labels(neighbour, outcome).inc()
