"""The real scheduler under a clock of its own: a step takes what a cost function says, nothing sleeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.batch import Batch, RowOutput, StepLoad
from lora_serve.core.messages import Event, FinishEvent, TokenEvent
from tests.engine.world import World


@dataclass
class Life:
    """Of one request, by the clock."""

    arrival: float
    tokens: list[float] = field(default_factory=list)  # when each came

    @property
    def first_token(self) -> float:
        """Seconds from its arrival."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(frozen=True)
class Arrival:
    """One request to come."""

    at: float
    num_prompt: int
    num_output: int


class TimedWorld(World):
    """`seconds_of` is the machine."""

    def __init__(self, seconds_of: Callable[[StepLoad], float], **settings: Any) -> None:
        super().__init__(**{"num_blocks": 4096, "max_model_len": 2000, **settings})
        self.now = 0.0
        self.seconds_of = seconds_of
        self.lives: dict[str, Life] = {}
        self.batches: list[tuple[float, Batch]] = []  # when each began

    def arrive(self, request_id: str, num_prompt: int = 4, num_output: int = 1, **fields: Any) -> None:
        self.lives[request_id] = Life(self.now)
        number = len(self.lives)
        prompt = [(7 * number + 3 * i) % 499 for i in range(num_prompt)]
        self.add(request_id, prompt, max_tokens=num_output, **{"arrival_time": self.now, **fields})

    def timed_step(self) -> Batch | None:
        """One step, and the clock goes on by what it takes."""
        batch, events = self.scheduler.schedule(self.now)
        self.take(events)
        if batch is None:
            return None
        self.engine._load_slots()
        self.batches.append((self.now, batch))
        seconds = self.seconds_of(batch.load)
        self.now += seconds
        self.note(self.scheduler.update(self.outputs(batch), batch, self.now))
        self.scheduler.observe(batch.load, seconds)
        return batch

    def outputs(self, batch: Batch) -> list[RowOutput]:
        return self.runner.run(batch)

    def note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                self.lives[event.request_id].tokens.append(self.now)
        self.take(events)

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """All of them, each at its time, to their ends."""
        coming = sorted(arrivals, key=lambda arrival: arrival.at)
        count = 0
        while count < len(coming) or self.scheduler.running or self.scheduler.waiting:
            while count < len(coming) and coming[count].at <= self.now:
                self._admit(f"r{len(self.lives)}", coming[count])
                count += 1
            if self.timed_step() is None:
                next_arrival = coming[count].at if count < len(coming) else math.inf
                deadline = self.scheduler.next_deadline(self.now)
                woken_at = min(next_arrival, math.inf if deadline is None else deadline)
                assert woken_at > self.now, "it spins"
                assert woken_at < math.inf, "it sleeps for ever"
                self.now = woken_at

    def _admit(self, request_id: str, arrival: Arrival) -> None:
        self.arrive(request_id, arrival.num_prompt, arrival.num_output, arrival_time=arrival.at)
        self.lives[request_id].arrival = arrival.at

    def ended(self) -> set[str]:
        return {name for name, event in self.ends.items() if isinstance(event, FinishEvent)}


class FastOutputs(TimedWorld):
    """Without the fake runner's cache and its checks: for thousands of steps."""

    def outputs(self, batch: Batch) -> list[RowOutput]:
        return [RowOutput(row.sequence_id, None if row.sample is None else 1) for row in batch.rows]


def p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1) + 0.5)]
