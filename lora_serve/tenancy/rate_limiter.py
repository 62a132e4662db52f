"""Requests, tokens and registrations per minute: reserved before one begins, tokens corrected when it has ended."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lora_serve.core.errors import RateLimitedError, Standing, Standings, Unit

WINDOW = 60.0  # seconds
_ROUNDING = 1e-9
KEPT_MINUTES = 3  # counters of this minute and the one before are read
_RETRY = 2.0  # seconds without asking counters that did not answer
_REMEMBERED = 1.0  # seconds for which a refusal is repeated without asking the counters
_AWAY = 2.0  # seconds to say when the counters cannot be reached
_log = logging.getLogger(__name__)

Counts = dict[str, tuple[int, int]]  # by name: of the minute before, of this one


class RateCounters(Protocol):
    """Counters by name and minute. Raises OSError if they cannot be reached."""

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """Adds to the counters of `minute`; returns them as they are then, with those of the minute before."""

    async def close(self) -> None:
        """Gives back what is held."""


class MemoryCounters:
    """The counters of this process alone. A wall clock that jumps and comes back finds the counts of its minute
    again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[int, Counter[str]] = {}
        self._used_at: dict[int, float] = {}  # by minute, in seconds of `clock`

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        now = self._clock()
        if minute not in self._minutes:
            for old in [known for known, used_at in self._used_at.items() if now - used_at > 60 * KEPT_MINUTES]:
                del self._minutes[old], self._used_at[old]
            self._minutes[minute] = Counter()
        self._used_at[minute] = now
        before, current = self._minutes.get(minute - 1, Counter()), self._minutes[minute]
        for name, amount in amounts.items():
            current[name] += amount
        return {name: (before[name], current[name]) for name in amounts}

    async def close(self) -> None:
        """See RateCounters."""


@dataclass(eq=False)
class SharedCounters:
    """The counters to use now: the shared ones, else this server's own."""

    _shared: RateCounters | None  # None: there are none to share
    _goes_on_alone: bool = True  # count here while the shared ones are away
    _clock: Callable[[], float] = time.monotonic
    _own: MemoryCounters = field(default_factory=MemoryCounters)
    _away_until: float | None = None  # when to ask again; None: they answered the last time

    @property
    def choices(self) -> tuple[RateCounters, ...]:
        """The counters to try, in order; empty: nothing can be counted now."""
        own: tuple[RateCounters, ...] = (self._own,) if self._shared is None or self._goes_on_alone else ()
        if self._shared is None or (self._away_until is not None and self._clock() < self._away_until):
            return own
        return (self._shared, *own)

    def failed(self, counters: RateCounters, error: Exception) -> None:
        """Notes that counters did not answer."""
        if counters is not self._shared:
            return
        if self._away_until is None:
            consequence = "limits are counted here alone" if self._goes_on_alone else "limited callers are refused"
            _log.warning("the shared rate counters cannot be reached (%s): %s until they can", error, consequence)
        self._away_until = self._clock() + _RETRY

    def answered(self, counters: RateCounters) -> None:
        """Notes that counters answered."""
        if counters is self._shared and self._away_until is not None:
            self._away_until = None
            _log.info("the shared rate counters answer again")

    async def close(self) -> None:
        """Give back what is held."""
        await self._own.close()
        if self._shared is not None:
            await self._shared.close()


@dataclass(frozen=True, slots=True)
class WindowCount:
    """The counts of the minute before and of this one, of which the part `elapsed` is over, 0 to 1."""

    previous: int
    current: int
    elapsed: float

    @property
    def used(self) -> float:
        """The part of a limit that is used now."""
        return self.previous * (1 - self.elapsed) + self.current

    def is_within(self, limit: int) -> bool:
        return self.used <= limit + _ROUNDING

    def remaining(self, limit: int) -> int:
        """How much could be asked for now."""
        return max(0, math.floor(limit - self.used + _ROUNDING))

    def seconds_until(self, limit: int, cost: int) -> float:
        """Seconds until `cost` fits if no other request comes; two minutes for what never fits."""
        if cost > limit:
            return 2 * WINDOW
        left = limit - self.current - cost
        if left >= 0:
            return WINDOW * max(0.0, _part_to_pass(self.previous, left) - self.elapsed)
        return WINDOW * (1 - self.elapsed + _part_to_pass(self.current, limit - cost))

    @property
    def seconds_until_unused(self) -> float:
        """Seconds until nothing counts any more."""
        if self.current > 0:
            return WINDOW * (2 - self.elapsed)
        return WINDOW * (1 - self.elapsed) if self.previous > 0 else 0.0


def _part_to_pass(count: int, left: int) -> float:
    """The part of a minute that must be over for the count of the one before it to weigh no more than `left`."""
    return 0.0 if count <= left else 1 - left / count


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `limit` of `unit` per minute. `scope`: `tenant:<name>` or `key:<id>`."""

    scope: str
    unit: Unit
    limit: int

    @property
    def name(self) -> str:
        """The name of its counter."""
        return f"{self.scope}:{self.unit}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """The tokens that a request holds, and the counters that they were taken from."""

    counters: RateCounters
    minute: int
    tokens: Mapping[str, int]  # by the counter's name
    standings: Standings


@dataclass(frozen=True, slots=True)
class _LastRefusal:
    """A refusal, to be repeated until `until`. `error` makes it anew: one that was raised keeps the frames that it went
    through, and with them the request.
    """

    until: float
    error: Callable[[], RateLimitedError]

    def holds(self, now: float) -> bool:
        """False also if the clock was set back, which must not keep it alive."""
        return self.until - _REMEMBERED <= now < self.until


class RateLimiter:
    """Reserves and settles. Holds nothing per request: that is in the Reservation."""

    def __init__(self, counters: SharedCounters, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds, so that replicas mean the same minute."""
        self._counters = counters
        self._clock = clock
        self._refusals: dict[
            str, _LastRefusal
        ] = {}  # the oldest first, by the name of a limit, which is none on tokens

    def check(self, limits: Sequence[RateLimit]) -> None:
        """Raises the refusal that the caller got within the last second once more, without asking the counters."""
        now = self._clock()
        for limit in limits:
            refusal = self._refusals.get(limit.name)
            if refusal is not None and refusal.holds(now):
                raise refusal.error()

    async def reserve(self, limits: Sequence[RateLimit], num_tokens: int) -> Reservation:
        """Reserves one request with at most `num_tokens` tokens. One larger than a whole limit counts as that limit, or
        it never could enter.

        Must not be cancelled; the reservation must be settled. Raises RateLimitedError, with nothing held.
        """
        costs = {limit: max(1, min(num_tokens, limit.limit)) if limit.unit == "tokens" else 1 for limit in limits}
        minute, elapsed = self._now()
        amounts = {limit.name: cost for limit, cost in costs.items()}
        counters, counts = await self._add(amounts, minute)
        windows = {limit: WindowCount(*counts[limit.name], elapsed) for limit in limits}
        failing = [limit for limit in limits if not windows[limit].is_within(limit.limit)]
        if not failing:
            tokens = {limit.name: costs[limit] for limit in limits if limit.unit == "tokens"}
            return Reservation(counters, minute, tokens, _standings(windows))
        await self._try_to_add(counters, {name: -amount for name, amount in amounts.items()}, minute)
        before = {limit: _without(windows[limit], costs[limit]) for limit in limits}
        raise self._refusal(failing, before, costs)

    async def used(self, limits: Sequence[RateLimit]) -> dict[Unit, int]:
        """The use of each limit now, rounded up. Raises RateLimitedError if the counters cannot be reached."""
        minute, elapsed = self._now()
        _, counts = await self._add({limit.name: 0 for limit in limits}, minute)
        return {limit.unit: math.ceil(WindowCount(*counts[limit.name], elapsed).used) for limit in limits}

    async def settle(self, reservation: Reservation, num_tokens: int) -> None:
        """Corrects a reservation once the request has ended: unused tokens are given back, further ones taken."""
        minute, _ = self._now()
        beyond = {name: num_tokens - held for name, held in reservation.tokens.items() if num_tokens > held}
        unused = {name: num_tokens - held for name, held in reservation.tokens.items() if num_tokens < held}
        if unused and minute - reservation.minute <= 1:  # an older minute is not read any more
            await self._try_to_add(reservation.counters, unused, reservation.minute)
        if beyond:
            await self._try_to_add(reservation.counters, beyond, minute)

    async def close(self) -> None:
        """Give back what is held."""
        await self._counters.close()

    def _now(self) -> tuple[int, float]:
        """The minute, and the part of it that is over."""
        minute, seconds = divmod(self._clock(), WINDOW)
        return int(minute), seconds / WINDOW

    async def _add(self, amounts: Mapping[str, int], minute: int) -> tuple[RateCounters, Counts]:
        for counters in self._counters.choices:
            try:
                counts = await counters.add(amounts, minute)
            except OSError as error:
                self._counters.failed(counters, error)
            else:
                self._counters.answered(counters)
                return counters, counts
        raise RateLimitedError("Your limits cannot be looked up at present; try again.", _AWAY, "limits_away")

    async def _try_to_add(self, counters: RateCounters, amounts: Mapping[str, int], minute: int) -> None:
        """Adds if the counters can be reached; else what was reserved stays charged until its minute is over."""
        try:
            await counters.add(amounts, minute)
        except OSError as error:
            self._counters.failed(counters, error)

    def _refusal(
        self, failing: Sequence[RateLimit], windows: Mapping[RateLimit, WindowCount], costs: Mapping[RateLimit, int]
    ) -> RateLimitedError:
        waits = {limit: windows[limit].seconds_until(limit.limit, costs[limit]) for limit in failing}
        limit = max(waits, key=lambda limit: waits[limit])
        whose = "your organisation" if limit.scope.startswith("tenant:") else "this key"
        message = (
            f"Rate limit reached for {whose} on {limit.unit} per minute: limit {limit.limit}, used "
            f"{round(windows[limit].used)}, requested {costs[limit]}. Try again in {waits[limit]:.1f} s."
        )
        reason = f"{limit.scope.partition(':')[0]}_{limit.unit}_per_minute"
        error = partial(RateLimitedError, message, waits[limit], reason, _standings(windows))
        refusal = _LastRefusal(self._clock() + min(_REMEMBERED, waits[limit]), error)
        if limit.unit != "tokens":
            self._remember(limit.name, refusal)
        return refusal.error()

    def _remember(self, name: str, refusal: _LastRefusal) -> None:
        """In place of those that are over: a refused caller may never come again."""
        now = self._clock()
        self._refusals.pop(name, None)
        while self._refusals:
            oldest = next(iter(self._refusals))
            if self._refusals[oldest].holds(now):
                break
            del self._refusals[oldest]
        self._refusals[name] = refusal


def _without(window: WindowCount, cost: int) -> WindowCount:
    return WindowCount(window.previous, window.current - cost, window.elapsed)


def _standings(windows: Mapping[RateLimit, WindowCount]) -> Standings:
    """The limit that leaves least, per unit."""
    tightest: dict[Unit, Standing] = {}
    for limit, window in windows.items():
        standing = Standing(limit.limit, window.remaining(limit.limit), window.seconds_until_unused)
        if limit.unit not in tightest or standing.remaining < tightest[limit.unit].remaining:
            tightest[limit.unit] = standing
    return tightest
