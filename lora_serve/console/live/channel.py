"""Frames for all viewers of one scope and rate: made once for all of them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from lora_serve.console.live.frames import Blocks, Bye, Frame, event, steps_of_frame
from lora_serve.console.live.scene import Happened, Scene
from lora_serve.core.live import EngineView, LiveLimits, LiveMove, LiveRequest, LiveSettings, LiveStep, LiveTier


@dataclass(frozen=True, slots=True)
class Overall:
    """Shown to those who see everything."""

    max_loras: int  # of one engine
    blocks: Blocks
    limits: LiveLimits
    tiers: Mapping[str, LiveTier]  # the same object as long as nobody looked at them again
    num_preemptions: int
    num_restarts: int


def overall_of(
    present: Sequence[EngineView], settings: LiveSettings, tiers: Mapping[str, LiveTier], num_restarts: int
) -> Overall:
    """The sums over all engines; limits are those of one, as the admin sets them for each."""
    return Overall(
        max((look.max_loras for look in present), default=0),
        Blocks(
            sum(look.num_blocks for look in present),
            sum(look.num_free_blocks for look in present),
            sum(look.num_known_blocks for look in present),
        ),
        settings.limits,
        tiers,
        sum(look.num_preemptions for look in present),
        num_restarts,
    )


def tiers_of(settings: Sequence[LiveSettings], stores: Mapping[str, LiveTier]) -> Mapping[str, LiveTier]:
    """The engines' tiers, added up, and the stores'."""
    found: dict[str, LiveTier] = {}
    for one in settings:
        for name, tier in one.tiers.items():
            found[name] = found[name].plus(tier) if name in found else tier
    return {**found, **stores}


MAX_STEPS = 256  # in a frame, as is the number of requests that ended, and of moves
QUIET_SECONDS = 1.0  # between two frames while nothing happens


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


class Channel:
    """See above. On the event loop."""

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
        """Gives the viewers a frame, if there is news; `now` on the event loop's clock, `time` in Unix seconds."""
        self.due = (math.floor(now * self.rate) + 1) / self.rate
        scene = self.scene
        shown = (scene.requests, scene.slots, scene.loading, scene.queue)
        has_news = bool(self._steps or self._ended or self._moves) or shown != self._shown
        if not has_news and now - self._sent_at < QUIET_SECONDS - 0.01:
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
