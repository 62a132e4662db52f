"""A pool of threads for calls that may hang: a thread that exceeds its time is counted out and replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lora_serve.core.errors import AdapterUnavailableError

MAX_HUNG = 16  # replaced threads that still hang; with more, no call is begun until one returns
_log = logging.getLogger(__name__)


class _Call:
    """One call, and the callback for the case that it hangs."""

    def __init__(self, run: Callable[[], None], on_hang: Callable[[], None]) -> None:
        self.run = run
        self.on_hang = on_hang
        self.deadline = 0.0
        self.is_hung = False


class WatchdogPool:
    """Every method may be called from any thread. The calls of several tenants take turns."""

    def __init__(
        self, name: str, num_threads: int, timeout: float, on_start: Callable[[], None] = lambda: None
    ) -> None:
        """`timeout`: seconds after which a call counts as hung. `on_start`: called first on each thread."""
        self._name = name
        self._num_threads = num_threads
        self._timeout = timeout
        self._on_start = on_start
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Call]] = {}  # by tenant; the first one is next
        self._running: set[_Call] = set()
        self._num_live = 0  # threads that do not hang
        self._num_idle = 0
        self._num_hung = 0
        self._is_watched = False
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """True if a call waits or runs; hung calls do not count."""
        return bool(self._queues or self._running)

    def submit(self, run: Callable[[], None], on_hang: Callable[[], None], tenant: str = "") -> None:
        """Have `run`, which must not raise, run on a thread. Raises AdapterUnavailableError if no thread can take it.

        `on_hang`: called on another thread if `run` takes too long, or cannot begin as too many others hang.
        """
        with self._changed:
            if self._is_closed:
                raise AdapterUnavailableError("The server is shutting down.")
            if not self._num_live and not self._may_start:
                raise AdapterUnavailableError("The adapter store does not answer at present; try again.")
            call = _Call(run, on_hang)
            self._start_threads(self._num_waiting + 1)
            self._queues.setdefault(tenant, deque()).append(call)
            self._changed.notify_all()

    def close(self, timeout: float, *, drop: bool = True) -> None:
        """Wait, `timeout` seconds at most, for running calls that do not hang. `drop`: waiting calls are not begun."""
        with self._changed:
            if not drop:
                self._changed.wait_for(lambda: not self.is_busy, timeout)
            self._is_closed = True
            self._queues.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, timeout)

    # -- under the lock ----------------------------------------------------------------------------------------

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def _may_start(self) -> bool:
        return self._num_live < self._num_threads and self._num_live + self._num_hung < self._num_threads + MAX_HUNG

    def _start_threads(self, num_waiting: int) -> None:
        """Start as many threads as are missing. Raises AdapterUnavailableError if there is none at all."""
        while self._num_idle < num_waiting and self._may_start:
            try:
                self._start(self._work)
                self._num_live += 1
                self._num_idle += 1  # until it takes a call
                if not self._is_watched:
                    self._start(self._watch)
                    self._is_watched = True
            except RuntimeError as error:  # the system gives no more threads
                _log.warning("no thread for %s: %r", self._name, error)
                if not self._num_live:
                    raise AdapterUnavailableError("There is no thread to load adapters at present.") from None
                return

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=self._name, daemon=True).start()

    def _next(self) -> _Call:
        tenant = next(iter(self._queues))
        queue = self._queues.pop(tenant)
        call = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # behind the other tenants
        return call

    def _count_out(self, now: float) -> list[_Call]:
        """Marks the running calls that are overdue; returns these, and the waiting calls if no thread is left."""
        overdue = [call for call in self._running if call.deadline <= now]
        for call in overdue:
            call.is_hung = True
            self._running.discard(call)
            self._num_live -= 1
            self._num_hung += 1
        if overdue:
            with suppress(AdapterUnavailableError):  # no thread is left: the waiting calls are given up below
                self._start_threads(self._num_waiting)
            if not self._num_live:
                overdue += [call for queue in self._queues.values() for call in queue]
                self._queues.clear()
            self._changed.notify_all()
        return overdue

    # -- on threads --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._on_start()
        while (call := self._taken()) is not None:
            try:
                call.run()
            except BaseException:  # without its thread the call would count as hung for ever
                _log.exception("%s: a call raised an exception", self._name)
            with self._changed:
                self._changed.notify_all()
                self._running.discard(call)
                if call.is_hung:
                    self._num_hung -= 1
                    if self._num_live >= self._num_threads:
                        return  # another thread took this one's place
                    self._num_live += 1
                self._num_idle += 1

    def _taken(self) -> _Call | None:
        with self._changed:
            while not self._queues and not self._is_closed:
                self._changed.wait()
            self._num_idle -= 1
            if self._is_closed:
                self._num_live -= 1
                return None
            call = self._next()
            call.deadline = time.monotonic() + self._timeout
            self._running.add(call)
            self._changed.notify_all()
            return call

    def _watch(self) -> None:
        while True:
            with self._changed:
                overdue = self._count_out(time.monotonic())
                if not overdue:
                    if self._is_closed and not self._running:
                        return
                    ends = [call.deadline for call in self._running]
                    self._changed.wait(min(ends) - time.monotonic() if ends else None)
                num_hung = self._num_hung
            if overdue and num_hung == len([call for call in overdue if call.is_hung]):  # the first since none hung
                _log.error("%s: a call hangs for %g s; another thread takes its place", self._name, self._timeout)
            for call in overdue:
                call.on_hang()
