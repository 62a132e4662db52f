"""A limit on the rows of a tenant, and of a key, that run at the same time: further rows wait their turn, in order.

Plain Python on the event loop's thread, no lock. The counts are this server's own: a replica that dies must not keep
the others' places. A limit that an admin changes comes with the next row and counts for those that wait, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from lora_serve.core.errors import RateLimitedError, RequestTimeoutError


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
            if self._has_room(limits):  # then nobody waits for these scopes
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
        """Grants places to the rows that have room now, the longest waiting first."""
        for waiter in list(self._waiters):
            has_left = waiter.granted.done()  # cancelled, but its task has not run since
            if not has_left and self._has_room(waiter.limits):
                del self._waiters[waiter]
                self._take(waiter.limits)
                waiter.granted.set_result(None)

    def _take(self, limits: Sequence[ConcurrencyLimit]) -> None:
        self._held.update(limit.scope for limit in limits)

    def _has_room(self, limits: Sequence[ConcurrencyLimit]) -> bool:
        return all(self._held[limit.scope] < self._limits[limit.scope] for limit in limits)
