"""All viewers of one server. The engine is looked at only while there are some, as often as the fastest asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lora_serve.client.base import EngineClient
from lora_serve.console.live.frames import Broadcast, Viewer, overall_of, tiers_of
from lora_serve.console.live.scene import Owns, Scene
from lora_serve.core.errors import CapacityError, EngineLostError, LoraServeError
from lora_serve.core.live import EngineView, LiveSettings, LiveTier

MAX_VIEWERS = 64
MAX_OF_TENANTS = 48  # of all tenants together, so that the admin can look in any case
MAX_OF_TENANT = 16  # so that no tenant takes the places of others
MAX_RATE = 10  # looks per second, whatever rates there are
_FULL_SECONDS = 1.0  # between two looks at what seldom changes
_FIRST_LOOKS = 10
_STALE_SECONDS = 5.0  # after which the last look at an engine that does not answer is dropped
_TICK = 0.2  # seconds between two looks at the server's own state, and at viewers' keys
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """The server that is shown."""

    client: EngineClient
    store_tiers: Callable[[], Awaitable[Mapping[str, LiveTier]]]
    num_restarts: Callable[[], int]
    ending: Callable[[], str | None]  # why all streams end now, if they do
    owns: Owns


class Hub:
    """On the event loop. `close` ends all streams."""

    def __init__(self, watched: Watched) -> None:
        self.started = round(time.time(), 3)
        self._watched = watched
        self._broadcasts: dict[tuple[str | None, float, int], Broadcast] = {}  # by scope, `since` and rate
        self._scenes: dict[tuple[str | None, float], Scene] = {}
        self._present: dict[str, tuple[EngineView, float]] = {}  # the last look at each engine, and when that was
        self._marks: dict[str, int] = {}  # by engine: what was seen of it
        self._settings: dict[str, LiveSettings] = {}
        self._tiers: Mapping[str, LiveTier] = {}
        self._full_at = self._watched_at = -1.0
        self._viewers: Counter[str | None] = Counter()  # by scope
        self._looking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def viewing(self, scope: str | None, rate: int, since: float = 0.0) -> AsyncIterator[Viewer]:
        """A viewer of what `scope` may see (None: all), `rate` times a second, as long as the block lasts. `since`: see
        `Scene`.

        Raises CapacityError if there are too many, and what a client raises that has no engine.
        """
        self._check_places(scope)
        self._viewers[scope] += 1
        try:
            if not self._tasks or not self._settings:
                await self._watch_first()
            viewer = Viewer()
            broadcast = self._broadcast(scope, since, rate)
            broadcast.join(viewer)
            self._begin()
            try:
                yield viewer
            finally:
                broadcast.viewers.discard(viewer)
                self._drop_unwatched()
        finally:
            self._viewers[scope] -= 1
            if not self._viewers[scope]:
                del self._viewers[scope]
            if not self._viewers:
                self._rest()

    @property
    def settings(self) -> LiveSettings:
        """Those of one engine, as the admin's are the same for all; there is a viewer."""
        return next(iter(self._settings.values()))

    def close(self, reason: str) -> None:
        """End all streams, and say why."""
        for broadcast in self._broadcasts.values():
            for viewer in broadcast.viewers:
                viewer.end(reason)
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    # ----------------------------------------------------------------------------------------------------------

    def _check_places(self, scope: str | None) -> None:
        total = self._viewers.total()
        places = [(MAX_VIEWERS, total)]
        if scope is not None:
            places += [(MAX_OF_TENANTS, total - self._viewers[None]), (MAX_OF_TENANT, self._viewers[scope])]
        most, found = min(places, key=lambda place: place[0] - place[1])
        if found >= most:
            raise CapacityError(f"{most} live views are open, which is the most; close one.", retry_after=5.0)

    def _broadcast(self, scope: str | None, since: float, rate: int) -> Broadcast:
        scene = self._scenes.setdefault((scope, since), Scene(scope, since, self._watched.owns))
        return self._broadcasts.setdefault((scope, since, rate), Broadcast(scene, rate))

    def _begin(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._run(), name="live view"),
                asyncio.create_task(self._tick(), name="live view's viewers"),
            ]

    def _drop_unwatched(self) -> None:
        self._broadcasts = {key: broadcast for key, broadcast in self._broadcasts.items() if broadcast.viewers}
        watched = {(scope, since) for scope, since, _ in self._broadcasts}
        self._scenes = {key: scene for key, scene in self._scenes.items() if key in watched}

    def _rest(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._present, self._marks, self._settings, self._tiers = {}, {}, {}, {}
        self._full_at = -1.0

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._watch()
                self._send(clock())
                now = clock()
                due = min((broadcast.due for broadcast in self._broadcasts.values()), default=now)
                await asyncio.sleep(max(due, self._watched_at + 0.9 / MAX_RATE) - now)
        except LoraServeError as error:
            self.close(str(error))
        except Exception:
            _log.exception("the live view failed")
            self.close("The live view failed; open it again.")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            if reason := self._watched.ending():
                self.close(reason)
            for broadcast in self._broadcasts.values():
                for viewer in broadcast.viewers:
                    viewer.look_up()

    async def _watch_first(self) -> None:
        """Raises EngineLostError if no engine answers: each of a fleet may be in a long step."""
        for _ in range(_FIRST_LOOKS):
            await self._watch()
            if self._settings:
                return
        raise EngineLostError("No engine answers at present; try again.", retry_after=1.0)

    async def _watch(self) -> None:
        async with self._looking:
            now = asyncio.get_running_loop().time()
            in_full = now - self._full_at >= _FULL_SECONDS or not self._settings
            scopes = list(dict.fromkeys(scope for scope, _ in self._scenes if scope is not None))
            views = await self._watched.client.watch(self._marks, scopes, in_full=in_full)
            self._take(views, now)
            if in_full and self._settings:
                self._full_at = now
                self._tiers = tiers_of(tuple(self._settings.values()), await self._watched.store_tiers())
            self._watched_at = now

    def _take(self, views: list[EngineView], now: float) -> None:
        self._marks |= {view.replica: view.mark for view in views}
        self._present |= {view.replica: (view, now) for view in views}
        self._settings |= {view.replica: view.settings for view in views if view.settings is not None}
        for replica, (_, at) in list(self._present.items()):
            if now - at > _STALE_SECONDS:
                del self._present[replica]
                if len(self._settings) > 1:  # they are alike, and a new viewer needs some
                    self._settings.pop(replica, None)
        present = [view for view, _ in self._present.values()]
        for scene in self._scenes.values():
            happened = scene.take(views, present)
            for broadcast in self._broadcasts.values():
                if broadcast.scene is scene:
                    broadcast.take(happened)

    def _send(self, now: float) -> None:
        present = [view for view, _ in self._present.values()]
        overall = overall_of(present, self.settings, self._tiers, self._watched.num_restarts())
        for broadcast in self._broadcasts.values():
            if broadcast.due <= now + 0.005:
                broadcast.send(now, time.time(), overall)
