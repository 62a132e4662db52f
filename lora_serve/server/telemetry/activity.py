"""How often adapters answered within the last minutes, and when they did last: of this server, since its start."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from lora_serve.adapters.catalog.entry import Route

STEP = 5  # seconds that are counted together
MINUTE = 60
WINDOW = 300  # seconds in which errors and shares are told
MAX_KNOWN = 40_000  # versions and tenants of which the last answer is known: some megabytes


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one adapter version, or of several together."""

    per_minute: int = 0  # begun by the engine, and ended within the last minute
    in_window: int = 0  # within the last WINDOW seconds
    errors: int = 0  # of those, the ones that an error ended
    last_used: float | None = None  # Unix seconds of the last one's end; None: none since the server's start

    def plus(self, other: Answers) -> Answers:
        """Adds another version's answers."""
        last = max(self.last_used or 0, other.last_used or 0) or None
        num, errors = self.in_window + other.in_window, self.errors + other.errors
        return Answers(self.per_minute + other.per_minute, num, errors, last)


NO_ANSWERS = Answers()


def _steps() -> array[int]:
    """Number, answers and errors of each step, one behind the other: the oldest first, none older than the window."""
    return array("q")


@dataclass(slots=True)
class _Counts:
    last_used: float = 0.0
    steps: array[int] = field(default_factory=_steps)
    route: Route | None = None  # with a canary: the last that chose the version
    routed: array[int] = field(default_factory=_steps)  # of the answers that it chose the version for


class Activity:
    """The counts, each twice: of everybody, and of one tenant. `record` on the event loop, `answers` on any thread."""

    def __init__(self, clock: Callable[[], float] = time.time, max_known: int = MAX_KNOWN) -> None:
        self._clock = clock
        self._max_known = max_known
        self._counts: OrderedDict[tuple[str, str, str | None], _Counts] = OrderedDict()  # the latest answer last
        self._in_window: OrderedDict[tuple[str, str, str | None], _Counts] = OrderedDict()  # those with steps, likewise

    def record(self, tenant: str, name: str, digest: str, *, failed: bool, route: Route | None = None) -> None:
        """Count an answer that has ended. Never waits and never fails.

        `route`: of the name, if it has a canary and chose the version, and is the same as when it did.
        """
        now = self._clock()
        for owner in (None, tenant):
            key = (name, digest, owner)
            counts = self._counts.setdefault(key, _Counts())
            counts.last_used = now
            _count(counts.steps, now, failed)
            if route is not None:
                if counts.route != route:
                    counts.route, counts.routed = route, _steps()
                _count(counts.routed, now, failed)
            self._in_window[key] = counts
            for known in (self._counts, self._in_window):
                known.move_to_end(key)
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Drops the steps of whoever had no answer within the window, and the longest unused altogether."""
        while next(iter(self._in_window.values())).last_used < now - WINDOW - STEP:
            _, counts = self._in_window.popitem(last=False)
            counts.steps, counts.routed = _steps(), _steps()
        while len(self._counts) > self._max_known:
            key, _ = self._counts.popitem(last=False)
            self._in_window.pop(key, None)

    def answers(self, name: str, digest: str, tenant: str | None = None, since: float = 0.0) -> Answers:
        """The answers of a version to one tenant (None: to all), without those before `since` (Unix seconds)."""
        counts = self._counts.get((name, digest, tenant))
        if counts is None or counts.last_used < since:
            return NO_ANSWERS
        return self._told(counts.steps, counts.last_used, since)

    def routed(self, name: str, digest: str, route: Route, tenant: str | None = None, since: float = 0.0) -> Answers:
        """Those of the answers for which this route, as it is now, chose the version. `last_used` is the version's."""
        counts = self._counts.get((name, digest, tenant))
        if counts is None or counts.route != route or counts.last_used < since:
            return NO_ANSWERS
        return self._told(counts.routed, counts.last_used, since)

    def _told(self, counted: array[int], last_used: float, since: float) -> Answers:
        last = self._clock() // STEP  # not full yet
        before = max(last - WINDOW // STEP, since // STEP - 1)
        flat = counted.tolist()
        steps = [step for step in zip(flat[::3], flat[1::3], flat[2::3], strict=True) if step[0] > before]
        per_minute = sum(num for number, num, _ in steps if number > last - MINUTE // STEP)
        num, errors = sum(step[1] for step in steps), sum(step[2] for step in steps)
        return Answers(per_minute, num, errors, last_used)


def _count(steps: array[int], now: float, failed: bool) -> None:
    """Each change is one call, so that another thread reads whole steps."""
    number = int(now // STEP)
    if not steps or steps[-3] != number:
        steps.extend(array("q", (number, 0, 0)))
        if len(steps) > 3 * WINDOW // STEP:
            del steps[:3]
    steps[-2] += 1
    steps[-1] += failed
