"""One replica in virtual time: the server's own engine, and a runner and a loader that only take time."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import CapacityError
from lora_serve.core.figures import LoadTimes
from lora_serve.core.messages import ErrorEvent, Event, SmokeTestResult, StepEvent
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import ReplicaReport, report_of
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.routing.fleet_view import RecentRoots
from lora_serve.simulate.profiles import Profile

_TICK = 1e-3  # seconds: a deadline that is not acted on is not tried again at once


class VirtualClock:
    """The time of one replica, in seconds. In the middle of a step it is ahead of the timeline."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timeline:
    """The event loop of the whole fleet: actions by time; of one time, in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num_planned = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        assert time >= self.now, "the past is over"
        heapq.heappush(self._heap, (time, self._num_planned, action))
        self._num_planned += 1

    def run(self) -> None:
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()


class SimulatedRunner:
    """An `engine.Runner` that advances its clock by the time of a step or a copy; every token is 0."""

    def __init__(self, profile: Profile, clock: VirtualClock) -> None:
        self._profile = profile
        self._clock = clock
        self.num_steps = 0
        self.num_tokens = 0

    def load_slot(self, slot: SlotRef, adapter: AdapterRef) -> None:
        self._clock.now += self._profile.copy.seconds(adapter.num_bytes)

    def clear_slot(self, index: int) -> None:
        """Takes no time."""

    def run(self, batch: Batch) -> list[RowOutput]:
        load = batch.load
        self.num_steps += 1
        self.num_tokens += load.num_tokens
        self._clock.now += self._profile.steps.seconds(load)
        return [RowOutput(row.sequence_id, None if row.sample is None else 0) for row in batch.rows]

    def move_blocks(self, moves: BlockMoves) -> None:
        """Moves nothing: a simulation has no swap space."""

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        return SmokeTestResult(1.0, 0.0, 1.0)


class SimulatedLoader:
    """As many loads at a time as there are threads, first come, first served; the local disk keeps what was fetched.

    The pacing of threads while steps run (`adapters.loader.Pace`), and their cost to steps, are left out.
    """

    def __init__(
        self,
        profile: Profile,
        clock: VirtualClock,
        timeline: Timeline,
        post: Callable[[LoadFinished[AdapterRef]], None],
    ) -> None:
        self._profile = profile
        self._clock = clock
        self._timeline = timeline
        self._post = post
        self._free_at = [0.0] * profile.load_threads  # a heap
        self._on_disk: OrderedDict[str, int] = OrderedDict()  # bytes, the longest unused first
        self._disk_bytes = 0
        self.num_remote = 0

    def submit(self, adapter: AdapterRef) -> None:
        """Starts a load, whose end is posted when it is due."""
        tier = "disk" if adapter.digest in self._on_disk else "remote"
        transfer = self._profile.disk if tier == "disk" else self._profile.remote
        seconds = transfer.seconds(adapter.num_bytes)
        end = max(self._clock.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, end)
        self._keep(adapter)
        message = LoadFinished(adapter.digest, adapter, None, seconds, LoadTimes(tier, fetch=seconds))
        self._timeline.at(end, lambda: self._post(message))

    def _keep(self, adapter: AdapterRef) -> None:
        if adapter.digest not in self._on_disk:
            self._disk_bytes += adapter.num_bytes
            self.num_remote += 1
        self._on_disk[adapter.digest] = adapter.num_bytes
        self._on_disk.move_to_end(adapter.digest)
        while self._disk_bytes > self._profile.disk_bytes and len(self._on_disk) > 1:
            _, num_bytes = self._on_disk.popitem(last=False)
            self._disk_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Asks for a report."""

    answer: Callable[[ReplicaReport], None]


ReplicaMessage = InferenceRequest | LoadFinished[AdapterRef] | ReportRequest


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
        self._mailbox: deque[ReplicaMessage] = deque()
        self._is_stepping = False
        self._num_turns = 0
        self.runner = SimulatedRunner(profile, self._clock)
        self.loader = SimulatedLoader(profile, self._clock, timeline, self.post)
        spec = ModelSpec(
            profile.name, "Simulated", 2, profile.max_model_len, (), 1, {}, 0, "bfloat16", profile.device,
            captured_tokens=getattr(profile.steps, "captured_tokens", 0),
        )  # fmt: skip
        adapters = AdapterConfig(  # the tiers' limits; the stores of weights do not matter here
            store=Path(),
            max_loras=profile.max_loras,
            max_lora_rank=profile.adapter_rank,
            adapter_host_memory=profile.host_bytes,
            adapter_load_threads=profile.load_threads,
        )
        self.engine = build_engine(
            self.runner, spec, profile.num_blocks, config, adapters, self.loader.submit, self._clock
        )

    def post(self, message: ReplicaMessage) -> None:
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

    def _take(self, message: ReplicaMessage) -> list[Event]:
        if isinstance(message, InferenceRequest):
            return self.engine.scheduler.add(message)
        if isinstance(message, ReportRequest):
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
