"""Virtual time, and a runner and a loader that only take time."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.stats import LoadTimes
from lora_serve.simulate.profiles import Profile


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
