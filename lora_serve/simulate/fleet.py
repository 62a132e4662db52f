"""Replicas behind a router, each with its own engine and the loop of `engine/loop.py` in virtual time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import CapacityError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, PromptEvent, StepEvent
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.replica_report import ReplicaReport, report_of
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.build import build_engine
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.routing.fleet_view import FleetView
from lora_serve.routing.prefix_roots import RecentRoots
from lora_serve.routing.routed_request import RoutedRequest, routed
from lora_serve.routing.routers import create_router
from lora_serve.simulate.figures import Recorder
from lora_serve.simulate.profiles import Profile
from lora_serve.simulate.runner import SimulatedLoader, SimulatedRunner, Timeline, VirtualClock
from lora_serve.simulate.workload import Arrival

_REPORT_EVERY = 1.0  # seconds
_UNKNOWN_OUTPUT = 256  # tokens: no gateway knows how long an answer will be
_PREFIX_KEY = b"simulation"


@dataclass(frozen=True, slots=True)
class _Look:
    """Asks for a report."""

    answer: Callable[[ReplicaReport], None]


Message = InferenceRequest | LoadFinished[AdapterRef] | _Look
_TICK = 1e-3  # seconds: a deadline that is not acted on is not tried again at once


class Replica:
    """One server. Messages wait until its step ends; `emit` gets its events when the step is over, not before."""

    def __init__(
        self,
        index: int,
        profile: Profile,
        config: EngineConfig,
        timeline: Timeline,
        emit: Callable[[Replica, list[StepEvent]], None],
    ) -> None:
        self.index = index
        self.name = f"replica-{index}"
        self.roots = RecentRoots()
        self._timeline = timeline
        self._emit = emit
        self._clock = VirtualClock()
        self._gate = QueueGate(config.queue, lambda: timeline.now)
        self._mailbox: deque[Message] = deque()
        self._is_stepping = False
        self._num_turns = 0
        self.runner = SimulatedRunner(profile, self._clock)
        self.loader = SimulatedLoader(profile, self._clock, timeline, self.post)
        spec = ModelSpec(profile.name, "Simulated", 2, profile.max_model_len, (), 1, {}, 0, "bfloat16", "none")
        adapters = adapter_config(profile)
        self.engine = build_engine(
            self.runner, spec, profile.num_blocks, config, adapters, self.loader.submit, self._clock
        )

    def post(self, message: Message) -> None:
        """Takes in a request, which may be refused at the door, the end of a load, or a look."""
        if isinstance(message, InferenceRequest):
            try:
                self._gate.enter((message,))
            except CapacityError as refusal:
                self._emit(self, [ErrorEvent(message.request_id, refusal)])
                return
        self._mailbox.append(message)
        if not self._is_stepping:
            self._turn()

    def _turn(self) -> None:
        """Drains the mailbox and steps; the rest is done when the step is over."""
        self._num_turns += 1
        self._clock.now = self._timeline.now
        events: list[StepEvent] = []
        while self._mailbox:
            events += self._take(self._mailbox.popleft())
        did_run, new = self.engine.step()
        events += new
        self._is_stepping = True
        self._timeline.at(self._clock.now, lambda: self._end(events, did_run))

    def _take(self, message: Message) -> list[Event]:
        if isinstance(message, InferenceRequest):
            return self.engine.scheduler.add(message)
        if isinstance(message, _Look):
            message.answer(report_of(self.name, self._clock.now, self.engine.stats(), self.roots.roots))
            return []
        return self.engine.load_finished(message)

    def _end(self, events: list[StepEvent], did_run: bool) -> None:
        self._is_stepping = False
        for event in events:
            self._gate.leave(event.request_id)  # only its first event finds it there
        self._emit(self, events)
        if did_run or self._mailbox:
            self._turn()
        else:
            self._sleep()

    def _sleep(self) -> None:
        """Sleeps until a message comes, or something is due without one."""
        deadline = self.engine.scheduler.next_deadline(self._timeline.now)
        if deadline is not None and deadline < math.inf:
            number = self._num_turns
            self._timeline.at(max(deadline, self._timeline.now + _TICK), lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number == self._num_turns and not self._is_stepping:
            self._turn()


def adapter_config(profile: Profile, **changes: Any) -> AdapterConfig:
    """The tiers' limits; the stores of weights do not matter here."""
    return AdapterConfig(
        store=Path(),
        max_loras=profile.max_loras,
        max_lora_rank=profile.adapter_rank,
        adapter_host_memory=profile.host_bytes,
        adapter_load_threads=profile.load_threads,
        **changes,
    )


class StalledError(Exception):
    """No event is planned any more, and requests have not ended: a bug of the engine or of the simulator."""


class Gateway:
    """One door of the fleet: it knows the replicas by their reports, and its own requests."""

    def __init__(self, router: str, seed: int, replicas: Sequence[Replica]) -> None:
        self._router = create_router(router, seed)
        self.view = FleetView()
        for replica in replicas:
            self.view.add(replica.name)

    def choose(self, request: RoutedRequest) -> str:
        """The replica that gets the request, which counts from now on."""
        name = self._router.choose(request, self.view.replicas)[0]
        self.view.sent(name, request)
        return name


class Fleet:
    """Requests come to the gateways in turn. Each counts its own from arrival until the step that ended it is over; of
    everything else it knows what replicas reported: once a second, between two steps.
    """

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        router: str,
        num_replicas: int,
        num_warm: int = 0,
        num_gateways: int = 1,
    ) -> None:
        self.timeline = Timeline()
        self.recorder = Recorder(num_replicas, num_warm, dict(config.tenant_weight))
        self.replicas = [Replica(index, profile, config, self.timeline, self._emit) for index in range(num_replicas)]
        self.num_sent = [0] * num_replicas  # requests per replica
        self._by_name = {replica.name: replica for replica in self.replicas}
        self._gateways = [Gateway(router, config.seed + index, self.replicas) for index in range(num_gateways)]
        self._under_way: dict[str, tuple[Gateway, RoutedRequest]] = {}
        self._last_arrival = 0.0
        self._num_warm = num_warm
        self._warm_loads = (0, 0)
        self._key = _PREFIX_KEY if config.enable_prefix_caching else None

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Runs until all requests have ended. Raises StalledError."""
        self._plan_next(iter(arrivals))
        for replica in self.replicas:  # one after another, as replicas start
            self.timeline.at(_REPORT_EVERY * replica.index / len(self.replicas), partial(self._look, replica))
        self._last_arrival = arrivals[-1].time if arrivals else 0.0
        self.timeline.run()
        if lost := self.recorder.open_requests:
            raise StalledError(f"{len(lost)} of {len(arrivals)} requests never end, the first is {lost[0]}")

    def loads_since_warm(self) -> tuple[int, int]:
        """The loads of adapters into slots and into host memory since the warm-up's requests had come."""
        slot, host = self._loads()
        return slot - self._warm_loads[0], host - self._warm_loads[1]

    def _loads(self) -> tuple[int, int]:
        tiers = [replica.engine.residency.tiers() for replica in self.replicas]
        return sum(tier["device"].loads for tier in tiers), sum(tier["host"].loads for tier in tiers)

    def _look(self, replica: Replica) -> None:
        """Asks a replica for its report, and again after a second, until the last request has come."""
        replica.post(_Look(self._reported))
        if self.timeline.now < self._last_arrival:
            self.timeline.at(self.timeline.now + _REPORT_EVERY, partial(self._look, replica))

    def _reported(self, report: ReplicaReport) -> None:
        for gateway in self._gateways:
            gateway.view.update(report)

    def _plan_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.timeline.at(arrival.time, lambda: self._arrive(arrival, arrivals))

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival]) -> None:
        if arrival.index == self._num_warm:
            self._warm_loads = self._loads()
        request = arrival.request()
        gateway = self._gateways[arrival.index % len(self._gateways)]
        known = routed(request, self._key, gateway.view.expected_output(_UNKNOWN_OUTPUT))
        replica = self._by_name[gateway.choose(known)]
        self._under_way[request.request_id] = (gateway, known)
        self.num_sent[replica.index] += 1
        self.recorder.submitted(arrival, replica.index)
        self._plan_next(later)
        replica.post(request)

    def _emit(self, replica: Replica, events: list[StepEvent]) -> None:
        now = self.timeline.now
        for event in events:
            gateway, known = self._under_way[event.request_id]
            if isinstance(event, PromptEvent):
                replica.roots.add(known.roots)
                gateway.view.answering(replica.name, known)
            if self.recorder.take(event, now):
                num_output = self.recorder.outcomes[-1].num_output if isinstance(event, FinishEvent) else None
                gateway.view.ended(replica.name, known, num_output)
                del self._under_way[event.request_id]
        meter = self.recorder.meters[replica.index]
        if meter.is_due(now):
            meter.look({s.account for s in replica.engine.scheduler.waiting if s.ready_at <= now}, now)
