"""Replicas behind a router, and the requests that come to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_serve.core.config import EngineConfig
from lora_serve.core.messages import StepEvent
from lora_serve.simulate.profiles import Profile
from lora_serve.simulate.recorder import Recorder
from lora_serve.simulate.replica import Replica
from lora_serve.simulate.routers import create_router
from lora_serve.simulate.runner import Timeline
from lora_serve.simulate.workload import Arrival


class StalledError(Exception):
    """No event is planned any more, and requests have not ended: a bug of the engine or of the simulator."""


class Fleet:
    """The router counts a request from its arrival until the step that ended it is over; residency it sees at once."""

    def __init__(
        self, profile: Profile, config: EngineConfig, router: str, num_replicas: int, num_warm: int = 0
    ) -> None:
        self.timeline = Timeline()
        self.recorder = Recorder(num_replicas, num_warm, dict(config.tenant_weights))
        self.replicas = [Replica(index, profile, config, self.timeline, self._emit) for index in range(num_replicas)]
        self.num_sent = [0] * num_replicas  # requests per replica
        self._loads = [0] * num_replicas
        self._router = create_router(router, num_replicas)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Runs until all requests have ended. Raises StalledError."""
        self._plan_next(iter(arrivals))
        self.timeline.run()
        if lost := self.recorder.open_requests:
            raise StalledError(f"{len(lost)} of {len(arrivals)} requests never end, the first is {lost[0]}")

    def _plan_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.timeline.at(arrival.time, lambda: self._arrive(arrival, arrivals))

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival]) -> None:
        digest = arrival.adapter.digest
        index = self._router.choose(digest, self._loads, lambda replica, key: self.replicas[replica].holds(key))
        self._loads[index] += 1
        self.num_sent[index] += 1
        self.recorder.submitted(arrival, index)
        self._plan_next(later)
        self.replicas[index].post(arrival.request())

    def _emit(self, replica: Replica, events: list[StepEvent]) -> None:
        now = self.timeline.now
        for event in events:
            self._loads[replica.index] -= self.recorder.take(event, now)
        meter = self.recorder.meters[replica.index]
        if meter.is_due(now):
            meter.look({s.account for s in replica.engine.scheduler.waiting if s.ready_at <= now}, now)
