"""Work beside the event loop's handlers: tasks that outlive a request or never end, threads that tenants share, and
the transfers of registrations.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lora_serve.adapters.sources.base import OnBytes, RegistrationProgress, Staged, no_progress
from lora_serve.adapters.sources.connections import until
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.adapters.stores.files import remove_folder, words_of
from lora_serve.core.errors import NotReadyError, RateLimitedError, RequestError, StoreUnwritableError, contained
from lora_serve.core.process import PatientThreads

RESUME_SECONDS = 1.0
LONG = 8_000  # characters, token ids, or values: work on more would hold up the event loop too long
MAX_WAITING = 64  # calls of one tenant
RETRY_AFTER = 10.0  # seconds
NUM_TRANSFERS = 4  # of files from sources, at once; more wait their turn
_CLOSING = "The server is shutting down."
_NO_THREAD = "The system gives the server no thread for this at present; try again later."
_log = logging.getLogger(__name__)
T = TypeVar("T")


async def kept_going(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Work for as long as the server runs: an exception is logged, and the work begun again. Otherwise it would
    go unnoticed that, say, no deleted adapter is freed any more.
    """
    while True:
        try:
            await work()
            return
        except Exception:
            _log.exception("%s failed; it is begun again", name)
        await asyncio.sleep(RESUME_SECONDS)


@asynccontextmanager
async def running(*works: Callable[[], Awaitable[None]], name: str) -> AsyncIterator[None]:
    """Each of `works` is kept going in a task of its own for as long as the block lasts. `name`: of the tasks."""
    tasks = [asyncio.create_task(kept_going(work, name), name=name) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BackgroundTasks:
    """Tasks that outlive their request. They are held until they end, so that none is lost; failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run `work` to its end even if the caller is cancelled meanwhile (its client has left)."""
        return await asyncio.shield(self.start(work, name))

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for the tasks, `timeout` seconds at most; then cancel them."""
        if self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=timeout)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RequestError):  # callers hear of their own mistakes
            _log.warning("%s failed: %r", task.get_name(), error)


@dataclass(slots=True)
class _WaitingCall:
    call: Callable[[], Any]
    future: Future[Any]
    is_refused: bool = False  # the pool may take it all the same, once it has a thread


class FairThreads:
    """A few threads that tenants share fairly, and the calls that wait for them. Methods may be called from any thread.

    A tenant holds a limited number of them, whatever it sends. The next call is of the tenant that holds the fewest,
    then of the one that had the fewest turns. A new tenant begins with as many turns as the one that was served last
    had. A tenant that has used up its seconds of a minute comes after all others.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        each: int = 1,
        on_start: Callable[[], None] | None = None,
        seconds_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = MAX_WAITING,
        calls: str = "registrations",
    ) -> None:
        """`each`: how many threads one tenant holds at most. `on_start`: called first on each thread.
        `seconds_per_minute`: how long a tenant may hold threads before it comes after the others; None: no limit.
        `max_waiting`: calls of one tenant at most. `calls`: the word for them.
        """
        self._num_threads = num_threads
        self._each = each
        self._spent = _Spent(seconds_per_minute)
        self._clock = clock
        self._max_waiting = max_waiting
        self._calls = calls
        self._lock = threading.Lock()
        self._lines: dict[str, deque[_WaitingCall]] = {}  # by tenant
        self._turns: dict[str, int] = {}  # of those that wait or hold a thread
        self._last_turn = 0
        self._running: Counter[str] = Counter()
        self._is_closed = False
        self._has_thread = False  # it stays
        self._executor = PatientThreads(num_threads, name, initializer=on_start)

    def check(self, tenant: str) -> None:
        """Raises RateLimitedError if as many calls of the tenant wait as may."""
        if len(self._lines.get(tenant, ())) >= self._max_waiting:
            raise RateLimitedError(
                f"{self._max_waiting} {self._calls} of the tenant `{tenant}` wait already; try again later.",
                RETRY_AFTER,
                f"tenant_{self._calls}",
            )

    def is_busy(self, tenant: str) -> bool:
        """True if a call of the tenant runs."""
        return self._running[tenant] > 0

    async def run(self, call: Callable[[], T], tenant: str = "") -> T:
        """Run `call` on a thread in its turn, unless the caller has left by then. Raises what `call` raises,
        InternalError if that would end the thread, RateLimitedError, and NotReadyError after `close`, or if the system
        gives not even one thread.
        """
        return await asyncio.wrap_future(self.submit(call, tenant))

    def submit(self, call: Callable[[], T], tenant: str = "") -> Future[T]:
        """Do as `run` does, without waiting. Raises RateLimitedError, NotReadyError."""
        future = Future[T]()
        with self._lock:
            if self._is_closed:
                raise NotReadyError(_CLOSING)
            self.check(tenant)
            if tenant not in self._lines:
                self._turns[tenant] = max(self._turns.get(tenant, 0), self._last_turn)
            self._lines.setdefault(tenant, deque()).append(_WaitingCall(call, future))
            self._start_next()
        return future

    def close(self, *, wait: bool = True) -> None:
        """Refuse the calls that wait. `wait`: return when those that run have ended."""
        with self._lock:
            self._is_closed = True
            dropped = [waiting for line in self._lines.values() for waiting in line]
            self._lines.clear()
        for waiting in dropped:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(NotReadyError(_CLOSING))
        self._executor.shutdown(wait=wait)

    def _start_next(self) -> None:
        """Start calls while threads are free. Called under the lock.

        Raises NotReadyError if there is not one thread; then only the call that just came waits.
        """
        while self._running.total() < self._num_threads and (tenant := self._next()) is not None:
            line = self._lines.pop(tenant)
            waiting = line.popleft()
            if line:
                self._lines[tenant] = line  # behind those that had as many turns
            self._last_turn = max(self._last_turn, self._turns[tenant])
            self._turns[tenant] += 1
            self._running[tenant] += 1
            try:
                self._executor.submit(self._work, tenant, waiting)
                self._has_thread = True
            except RuntimeError as error:  # the system gives no more threads; the pool keeps the call for those it has
                _log.warning("no thread for %s: %r", self._calls, error)
                if not self._has_thread:
                    waiting.is_refused = True
                    self._running[tenant] -= 1
                    self._forget(tenant)
                    raise NotReadyError(_NO_THREAD, RETRY_AFTER) from None

    def _next(self) -> str | None:
        waiting = [tenant for tenant in self._lines if self._running[tenant] < self._each]
        return min(waiting, key=self._rank, default=None)

    def _rank(self, tenant: str) -> tuple[bool, int, int]:
        return self._spent.is_over(tenant, self._clock()), self._running[tenant], self._turns[tenant]

    def _forget(self, tenant: str) -> None:
        """Forget a tenant whose calls have all ended."""
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._lines:
                del self._turns[tenant]

    def _work(self, tenant: str, waiting: _WaitingCall) -> None:
        if waiting.is_refused:
            return
        begun, future = self._clock(), waiting.future
        result, error = None, None
        is_wanted = future.set_running_or_notify_cancel()
        if is_wanted:
            try:
                with contained():
                    result = waiting.call()
            except Exception as raised:
                error = raised
        with self._lock:
            now = self._clock()
            self._spent.add(tenant, now - begun, now)
            self._running[tenant] -= 1
            self._forget(tenant)
            if not self._is_closed:
                self._start_next()
        if error is not None:
            future.set_exception(error)
        elif is_wanted:
            future.set_result(result)


class _Spent:
    """How long each tenant held threads: a level that falls to zero within a minute without calls."""

    def __init__(self, seconds_per_minute: float | None) -> None:
        self._limit = seconds_per_minute
        self._levels: dict[str, tuple[float, float]] = {}  # seconds, and the time at which they were noted

    def is_over(self, tenant: str, now: float) -> bool:
        return self._limit is not None and self._level(tenant, now) > self._limit

    def add(self, tenant: str, seconds: float, now: float) -> None:
        if self._limit is not None:
            self._levels[tenant] = (self._level(tenant, now) + seconds, now)
            self._levels = {name: level for name, level in self._levels.items() if self._level(name, now) > 0}

    def _level(self, tenant: str, now: float) -> float:
        level, noted = self._levels.get(tenant, (0.0, now))
        return max(0.0, level - (now - noted) * (self._limit or 0.0) / 60)


class Staging:
    """Transfers of adapter files from a source into a private folder, a few at once, on threads of their own: a slow
    download holds none of the registry's. One tenant's downloads never hold all of them.
    """

    def __init__(self, sources: SourceTable, new_folder: Callable[[], Path], max_bytes: int) -> None:
        """`new_folder`: makes a private folder; may raise OSError. `max_bytes`: the limit for one adapter's files."""
        self._sources = sources
        self._new_folder = new_folder
        self._max_bytes = max_bytes
        self._threads = FairThreads("staging", NUM_TRANSFERS, each=NUM_TRANSFERS - 1)
        self._closing = threading.Event()

    async def stage(self, source: str, tenant: str = "", progress: OnBytes = no_progress) -> Staged:
        """The files that `source` names, for `tenant`. `progress`: gets the bytes that came, on another thread. Raises
        what `SourceTable.fetch` does, RateLimitedError, NotReadyError after `close`.

        After an error nothing stays behind, nor if the caller is cancelled meanwhile.
        """
        future = self._threads.submit(lambda: self._fetch(source, progress), tenant)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_discard)
            raise

    def close(self) -> None:
        """Break the transfers off; they end at their next bytes, or after their own timeout."""
        self._closing.set()
        self._threads.close(wait=False)

    def _fetch(self, source: str, progress: OnBytes) -> Staged:
        try:
            folder = self._new_folder()
        except OSError as error:
            raise StoreUnwritableError(f"The store cannot be written at present: {words_of(error)}.") from None
        return Staged(folder, self._sources.fetch(source, folder, self._max_bytes, until(self._closing, progress)))


def _discard(future: Future[Staged]) -> None:
    if not future.cancelled() and future.exception() is None:
        remove_folder(future.result().folder)


class Registering:
    """The registrations under way; changed on the event loop."""

    def __init__(self) -> None:
        self._all: Counter[RegistrationProgress] = Counter()  # how many blocks work on each

    @contextmanager
    def listed(self, progress: RegistrationProgress) -> Iterator[None]:
        """Lists a registration until the block ends, and every other block for it: the request's may end first."""
        self._all[progress] += 1
        try:
            yield
        finally:
            self._all[progress] -= 1
            if not self._all[progress]:
                del self._all[progress]

    def seen_by(self, scope: str | None, since: float = 0.0) -> list[RegistrationProgress]:
        """Those that a tenant began (None: all), the oldest first. `since`: when the tenant was made, in Unix seconds;
        what began before was begun by another one of that name.
        """
        return [one for one in self._all if scope is None or (one.scope == scope and one.started >= since)]
