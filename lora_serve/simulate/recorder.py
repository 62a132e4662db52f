"""The outcome of every request, from the events that the engines emit."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.core.messages import ErrorEvent, FinishEvent, PromptEvent, StepEvent, TokenEvent
from lora_serve.simulate.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, FairnessMeter
from lora_serve.simulate.workload import Arrival


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that has ended. Times are seconds."""

    index: int
    group: str
    replica: int
    arrival: float
    first_token: float | None  # None: it ended before
    end: float
    num_prompt: int
    num_cached: int
    num_output: int
    error: str | None  # its class; None: it ended well


@dataclass(slots=True)
class _Open:
    arrival: Arrival
    replica: int
    first_token: float | None = None
    last_token: float = 0.0
    num_cached: int = 0
    num_output: int = 0


class Recorder:
    """`num_warm`: the first so many requests count in the totals, but not in the gaps between tokens."""

    def __init__(self, num_replicas: int, num_warm: int = 0, weights: Mapping[str, float] | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self.gaps = array("d")
        self.meters = [FairnessMeter(weights) for _ in range(num_replicas)]
        self._num_warm = num_warm
        self._open: dict[str, _Open] = {}

    @property
    def open_requests(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._open)

    def submitted(self, arrival: Arrival, replica: int) -> None:
        """Notes a request that a router has sent to a replica."""
        self._open[str(arrival.index)] = _Open(arrival, replica)

    def take(self, event: StepEvent, now: float) -> bool:
        """Takes in an event; True if it ends its request."""
        record = self._open[event.request_id]
        if isinstance(event, TokenEvent):
            self._token(record, now)
        elif isinstance(event, PromptEvent):
            record.num_cached = event.num_cached_tokens
            computed = record.arrival.num_prompt - record.num_cached
            self.meters[record.replica].served(record.arrival.adapter.tenant, INPUT_WEIGHT * computed)
        elif isinstance(event, FinishEvent | ErrorEvent):
            self._end(record, event, now)
            return True
        return False

    def _token(self, record: _Open, now: float) -> None:
        if record.first_token is None:
            record.first_token = now
        elif record.arrival.index >= self._num_warm:
            self.gaps.append(now - record.last_token)
        record.last_token = now
        record.num_output += 1
        self.meters[record.replica].served(record.arrival.adapter.tenant, OUTPUT_WEIGHT)

    def _end(self, record: _Open, event: FinishEvent | ErrorEvent, now: float) -> None:
        del self._open[event.request_id]
        arrival = record.arrival
        self.outcomes.append(
            Outcome(
                arrival.index,
                arrival.group,
                record.replica,
                arrival.time,
                record.first_token,
                now,
                arrival.num_prompt,
                record.num_cached,
                record.num_output,
                type(event.error).__name__ if isinstance(event, ErrorEvent) else None,
            )
        )
