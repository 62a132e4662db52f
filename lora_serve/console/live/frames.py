"""Events of GET /admin/engine/stream, made once for all viewers of one scope and rate. Each frame is whole in itself:
one that is lost costs only its steps.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.console.live.scene import Happened, Latency, Scene, TokenRate
from lora_serve.core.live import (
    EngineView,
    LiveCount,
    LiveLimits,
    LiveMove,
    LiveRequest,
    LiveRow,
    LiveSettings,
    LiveSlot,
    LiveStep,
    LiveTargets,
    LiveTier,
)

KEEP_ALIVE = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode
MAX_STEPS = 256  # in a frame, as is the number of requests that ended, and of moves
QUIET_SECONDS = 1.0  # between two frames while nothing happens


class Hello(msgspec.Struct, frozen=True):
    """The first event: what does not change."""

    version: str
    started: float  # Unix seconds; another number: the server was started again
    model: str
    rate: float
    scope: str | None  # the tenant of which alone something is shown; None: all
    engine: str
    max_num_seqs: int
    block_size: int
    targets: LiveTargets


class Blocks(msgspec.Struct, frozen=True):
    """KV blocks; `cached`: whose content can be found again, in use or free."""

    total: int
    free: int
    cached: int


class Step(msgspec.Struct, frozen=True):
    """See `LiveStep`. UNSET: the rows are those of the replica's step before this one, in the same frame."""

    number: int
    time: float
    ms: float
    is_gap: bool
    replica: str
    rows: tuple[LiveRow, ...] | UnsetType = UNSET


class Frame(msgspec.Struct, frozen=True):
    """The engine as it is, and what it did since the frame before. What is not there is not for this viewer."""

    time: float
    number: int
    steps: Sequence[Step]
    requests: Sequence[LiveRequest]
    num_waiting: int
    num_running: int
    queue: Mapping[str, LiveCount]
    slots: Sequence[LiveSlot]
    max_loras: int
    loading: Sequence[str]
    moves: Sequence[LiveMove]
    tokens_per_second: TokenRate
    latency: Latency
    tiers: Mapping[str, LiveTier] | UnsetType = UNSET  # once a second
    blocks: Blocks | UnsetType = UNSET
    limits: LiveLimits | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    restarts: int | UnsetType = UNSET


class Bye(msgspec.Struct, frozen=True):
    """The last event: why the stream ends."""

    reason: str


def steps_of_frame(steps: Iterable[LiveStep]) -> tuple[Step, ...]:
    """The steps of one frame. Rows that decode are the same for hundreds of steps: they are sent once."""
    last: dict[str, tuple[LiveRow, ...]] = {}
    found = []
    for step in steps:
        rows = UNSET if last.get(step.replica) == step.rows else step.rows
        last[step.replica] = step.rows
        found.append(Step(step.number, step.time, step.ms, step.is_gap, step.replica, rows))
    return tuple(found)


def event(data: Hello | Frame | Bye) -> bytes:
    """A server-sent event, named after its kind."""
    return b"event: %b\ndata: %b\n\n" % (type(data).__name__.lower().encode(), _encode(data))


@dataclass(frozen=True, slots=True)
class Overall:
    """Shown to those who see everything."""

    max_loras: int  # of one engine
    blocks: Blocks
    limits: LiveLimits
    tiers: Mapping[str, LiveTier]  # the same object until they are read again
    num_preemptions: int
    num_restarts: int


def overall_of(
    present: Sequence[EngineView], settings: LiveSettings, tiers: Mapping[str, LiveTier], num_restarts: int
) -> Overall:
    """The sums over all engines; limits are those of one, as the admin sets them for each."""
    return Overall(
        max((view.max_loras for view in present), default=0),
        Blocks(
            sum(view.num_blocks for view in present),
            sum(view.num_free_blocks for view in present),
            sum(view.num_known_blocks for view in present),
        ),
        settings.limits,
        tiers,
        sum(view.num_preemptions for view in present),
        num_restarts,
    )


def tiers_of(settings: Sequence[LiveSettings], stores: Mapping[str, LiveTier]) -> Mapping[str, LiveTier]:
    """The engines' tiers, added up, and the stores'."""
    found: dict[str, LiveTier] = {}
    for one in settings:
        for name, tier in one.tiers.items():
            found[name] = found[name].plus(tier) if name in found else tier
    return {**found, **stores}


class Viewer:
    """One reader: the latest frame, and nothing else, waits for it."""

    def __init__(self) -> None:
        self._latest: bytes | None = None
        self._bye: bytes | None = None
        self._wake = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """True once there is nothing to come after the next event."""
        return self._bye is not None

    def offer(self, frame: bytes) -> None:
        """Puts a frame in the place of one that was not taken in time."""
        self._latest = frame
        self._wake.set()

    def look_up(self) -> None:
        """Lets the reader look after its own things."""
        self._wake.set()

    def end(self, reason: str) -> None:
        """The next event is the last one."""
        self._bye = event(Bye(reason))
        self._wake.set()

    async def next(self) -> bytes | None:
        """The next event; None: the reader was only woken."""
        await self._wake.wait()
        self._wake.clear()
        if self._bye is not None:
            return self._bye
        latest, self._latest = self._latest, None
        return latest


class Broadcast:
    """Frames for all viewers of one scope and rate, made once for all of them. On the event loop."""

    def __init__(self, scene: Scene, rate: int) -> None:
        self.scene = scene
        self.rate = rate
        self.viewers: set[Viewer] = set()
        self.due = 0.0  # on the event loop's clock
        self._number = 0
        self._steps: deque[LiveStep] = deque(maxlen=MAX_STEPS)
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_STEPS)
        self._moves: deque[LiveMove] = deque(maxlen=MAX_STEPS)
        self._shown: object = None  # the state in the last frame
        self._sent_at = -math.inf
        self._tiers: Mapping[str, LiveTier] | None = None  # the last that were sent

    def join(self, viewer: Viewer) -> None:
        """The next frame comes without delay, though nothing may have happened."""
        self.viewers.add(viewer)
        self._sent_at = -math.inf

    def take(self, happened: Happened) -> None:
        """Keeps events for the next frame; of too many the oldest are dropped."""
        self._steps.extend(happened.steps)
        self._ended.extend(happened.ended)
        self._moves.extend(happened.moves)

    def send(self, now: float, time: float, overall: Overall) -> None:
        """Gives the viewers a frame, if something changed; `now` on the event loop's clock, `time` in Unix seconds."""
        self.due = (math.floor(now * self.rate) + 1) / self.rate
        scene = self.scene
        shown = (scene.requests, scene.slots, scene.loading, scene.queue)
        has_changed = bool(self._steps or self._ended or self._moves) or shown != self._shown
        if not has_changed and now - self._sent_at < QUIET_SECONDS - 0.01:
            return
        self._shown, self._sent_at = shown, now
        self._number += 1
        frame = event(self._frame(time, overall))
        for notes in (self._steps, self._ended, self._moves):
            notes.clear()
        for viewer in self.viewers:
            viewer.offer(frame)

    def _frame(self, time: float, overall: Overall) -> Frame:
        scene, is_all = self.scene, self.scene.scope is None
        has_tiers = is_all and overall.tiers is not self._tiers
        self._tiers = overall.tiers
        return Frame(
            time=round(time, 3),
            number=self._number,
            steps=steps_of_frame(self._steps),
            requests=(*scene.requests, *self._ended),
            num_waiting=sum(count.waiting for count in scene.queue.values()),
            num_running=sum(count.running for count in scene.queue.values()),
            queue=scene.queue,
            slots=scene.slots,
            max_loras=overall.max_loras,
            loading=scene.loading,
            moves=tuple(self._moves),
            tokens_per_second=scene.tokens(time),
            latency=scene.latency(time),
            tiers=overall.tiers if has_tiers else UNSET,
            blocks=overall.blocks if is_all else UNSET,
            limits=overall.limits if is_all else UNSET,
            preemptions=overall.num_preemptions if is_all else UNSET,
            restarts=overall.num_restarts if is_all else UNSET,
        )
