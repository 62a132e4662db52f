"""A caller's quotas applied to one request: the permit of row 4 in docs/DESIGN.md, section 2."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from lora_serve.core.errors import RateLimitedError, RequestTimeoutError, Unit
from lora_serve.core.tenant import Caller, Quota, Tenant
from lora_serve.engine.queue_gate import WaitingLimit
from lora_serve.tenancy.rate_limiter import RateLimit, RateLimiter, Reservation, SharedCounters

# The fields of a quota that bound inference, and registrations.
_UNITS: Mapping[Unit, str] = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}
_REGISTRATIONS: Mapping[Unit, str] = {"registrations": "registrations_per_minute"}


@dataclass(frozen=True, slots=True)
class ConcurrencyLimit:
    """At most `limit` rows of `scope` (`tenant:<name>` or `key:<id>`) run at once."""

    scope: str
    limit: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    limits: Sequence[ConcurrencyLimit]
    granted: asyncio.Future[None]


class ConcurrencyLimiter:
    """Grants places. A row holds a place in all of its scopes or in none, so that no row waits while it holds one."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._limits: dict[str, int] = {}  # the newest of each scope that has rows
        self._num_rows: Counter[str] = Counter()  # that hold a place or wait
        self._waiters: dict[_Waiter, None] = {}  # in the order of coming

    @property
    def num_held(self) -> int:
        """Places held, over all scopes."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a place."""
        return len(self._waiters)

    def num_held_by(self, scope: str) -> int:
        """Places that a scope holds; without a limit it holds none."""
        return self._held[scope]

    @asynccontextmanager
    async def held(self, limits: Sequence[ConcurrencyLimit], deadline: float | None = None) -> AsyncIterator[None]:
        """One row's place, for as long as the block lasts. `deadline`: seconds of time.monotonic().

        Raises RequestTimeoutError if there is none until then, RateLimitedError if there never is one.
        """
        if not limits:
            yield
            return
        if any(limit.limit <= 0 for limit in limits):
            raise RateLimitedError("Of your quota, none of your requests may run at present.", 60, "tenant_running")
        with self._known(limits):
            if self._is_free(limits):  # then no row waits for these scopes
                self._take(limits)
            else:
                await self._wait(limits, deadline)
            try:
                yield
            finally:
                self._give_back(limits)

    @contextmanager
    def _known(self, limits: Sequence[ConcurrencyLimit]) -> Iterator[None]:
        """Knows a row's limits while it is here. If one was raised, the rows that wait come first."""
        is_raised = any(limit.limit > self._limits.get(limit.scope, limit.limit) for limit in limits)
        self._limits.update((limit.scope, limit.limit) for limit in limits)
        self._num_rows.update(limit.scope for limit in limits)
        if is_raised:
            self._grant()
        try:
            yield
        finally:
            for limit in limits:
                self._num_rows[limit.scope] -= 1
                if not self._num_rows[limit.scope]:
                    del self._num_rows[limit.scope], self._limits[limit.scope]

    async def _wait(self, limits: Sequence[ConcurrencyLimit], deadline: float | None) -> None:
        waiter = _Waiter(limits, asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.granted
        except TimeoutError:
            self._give_up(waiter)
            raise RequestTimeoutError("The request's time was over before one of your rows had ended.") from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: _Waiter) -> None:
        """Ends the wait; a place that was granted in the same moment is given back."""
        if self._waiters.pop(waiter, waiter) is waiter:
            self._give_back(waiter.limits)

    def _give_back(self, limits: Sequence[ConcurrencyLimit]) -> None:
        for limit in limits:
            self._held[limit.scope] -= 1
            if not self._held[limit.scope]:
                del self._held[limit.scope]
        self._grant()

    def _grant(self) -> None:
        """Grants places to the rows whose scopes have free ones, the longest waiting first."""
        for waiter in list(self._waiters):
            has_left = waiter.granted.done()  # cancelled, but its task has not run since
            if not has_left and self._is_free(waiter.limits):
                del self._waiters[waiter]
                self._take(waiter.limits)
                waiter.granted.set_result(None)

    def _take(self, limits: Sequence[ConcurrencyLimit]) -> None:
        self._held.update(limit.scope for limit in limits)

    def _is_free(self, limits: Sequence[ConcurrencyLimit]) -> bool:
        return all(self._held[limit.scope] < self._limits[limit.scope] for limit in limits)


class Quotas:
    """Limits per minute and of concurrency. Used on the event loop's thread; callers without limits cost nothing."""

    def __init__(self, limiter: RateLimiter | None = None, concurrency: ConcurrencyLimiter | None = None) -> None:
        self._limiter = limiter or RateLimiter(SharedCounters(None))
        self._acts = RateLimiter(SharedCounters(None))  # of this server: an admin may have to act while Redis is away
        self.concurrency = concurrency or ConcurrencyLimiter()
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, caller: Caller) -> None:
        """Raise RateLimitedError if the caller was refused a moment ago, before a body is read for nothing."""
        self._limiter.check(rate_limits(caller))

    async def reserve(self, caller: Caller, num_tokens: int) -> Reservation | None:
        """Reserves one request with at most so many tokens; None: the caller has no limit per minute.

        If the caller leaves meanwhile, nothing stays held. Raises RateLimitedError.
        """
        return await self._reserved(rate_limits(caller), num_tokens)

    async def begin_registration(self, caller: Caller) -> None:
        """Counts an upload or registration, before its bytes are read. Raises RateLimitedError."""
        limits = rate_limits(caller, _REGISTRATIONS)
        self._limiter.check(limits)
        await self._reserved(limits, 0)

    async def begin_act(self, caller: Caller, limit: int) -> None:
        """Counts a change by the admin API, at most `limit` per minute and key (0: any). Raises RateLimitedError."""
        if limit == 0:
            return
        limits = (RateLimit(f"key:{caller.key_id}", "acts", limit),)
        self._acts.check(limits)
        await self._acts.reserve(limits, 0)

    async def _reserved(self, limits: tuple[RateLimit, ...], num_tokens: int) -> Reservation | None:
        if not limits:
            return None
        task = asyncio.ensure_future(self._limiter.reserve(limits, num_tokens))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._drop)  # a command on its way to Redis is not broken off
            raise

    async def used(self, tenant: Tenant) -> dict[str, int]:
        """A tenant's use of its limits per minute and of rows, now, by the limit's name; what has no limit is not
        counted. Raises RateLimitedError if the counters cannot be reached.
        """
        caller = Caller(tenant.name, quota=tenant.quota, since=tenant.created)
        units = {**_UNITS, **_REGISTRATIONS}
        limits = rate_limits(caller, units)
        counted = await self._limiter.used(limits) if limits else {}
        found = {units[unit]: used for unit, used in counted.items()}
        for limit in concurrency_limits(caller):  # one at most: it is no key's
            found["max_running"] = self.concurrency.num_held_by(limit.scope)
        return found

    def settle(self, reservation: Reservation | None, num_tokens: int) -> None:
        """The request has ended and used so many tokens. Called exactly once for each reservation; never waits."""
        if reservation is not None and reservation.tokens:
            task = asyncio.ensure_future(self._limiter.settle(reservation, num_tokens))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until what was settled is written."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """After the last request has ended."""
        await self.settled()
        await self._limiter.close()
        await self._acts.close()

    def _drop(self, task: asyncio.Task[Reservation]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.settle(task.result(), 0)


def rate_limits(caller: Caller, units: Mapping[Unit, str] = _UNITS) -> tuple[RateLimit, ...]:
    """The caller's limits per minute, its tenant's first."""
    return tuple(
        RateLimit(scope, unit, limit)
        for scope, quota in _scopes(caller)
        for unit, field in units.items()
        if (limit := getattr(quota, field)) is not None
    )


def concurrency_limits(caller: Caller) -> tuple[ConcurrencyLimit, ...]:
    """How many of the caller's rows may run at once."""
    return tuple(ConcurrencyLimit(scope, q.max_running) for scope, q in _scopes(caller) if q.max_running is not None)


def waiting_limits(caller: Caller) -> tuple[WaitingLimit, ...]:
    """How many of the caller's requests may wait."""
    return tuple(WaitingLimit(scope, q.max_queued) for scope, q in _scopes(caller) if q.max_queued is not None)


def _scopes(caller: Caller) -> Iterator[tuple[str, Quota]]:
    # One that was deleted and made again does not begin with what the one before has used.
    life = f"@{caller.since:.3f}" if caller.since else ""
    yield f"tenant:{caller.tenant}{life}", caller.quota
    if caller.key_id:
        yield f"key:{caller.key_id}", caller.key_quota
