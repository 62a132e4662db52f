"""Loads adapters on threads of its own and posts what came of it. Touches no cache and no scheduler; no torch.

The in-flight set is the one state below the doors that two kinds of threads share, and so the one with a lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InternalError, LoraServeError
from lora_serve.core.load_times import LoadTimes

V = TypeVar("V")
_MAX_PAUSE = 2.0  # seconds
_NAP = 0.01  # seconds between two looks whether others still run
_CLOSE_SECONDS = 10.0  # that `close` waits: a disk that is gone may keep a load for ever
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[V]):
    """What a fetch gives."""

    value: V
    times: LoadTimes


@dataclass(frozen=True, slots=True)
class LoadFinished(Generic[V]):
    """Exactly one of `adapter` and `error` is given."""

    digest: str
    adapter: V | None
    error: LoraServeError | None
    seconds: float  # of the fetch itself, not of waiting for a thread
    times: LoadTimes | None = None  # None: it failed


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of the processor loads may take while others run: `share` of one core, all threads together.

    A thread that used t seconds of the processor rests until t is its part of the time; with nobody to disturb it
    goes on at once. Time spent waiting for a disk or a network is nobody's loss and so not counted.
    """

    is_busy: Callable[[], bool]  # whether anybody would be disturbed; called on the loader's threads
    share: float = 0.25

    def pause(self, used: float, num_threads: int) -> float:
        """Seconds to rest after `used` seconds of processor time, at most _MAX_PAUSE."""
        return min(_MAX_PAUSE, used * (num_threads / self.share - 1)) if self.is_busy() else 0.0


class Loader(Generic[V]):
    """One load per digest, however many wait for it."""

    def __init__(
        self,
        fetch: Callable[[AdapterRef], Loaded[V]],
        post: Callable[[LoadFinished[V]], None],
        num_threads: int = 2,
        *,
        keep: Callable[[AdapterRef, V], None] | None = None,
        pace: Pace | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """`fetch`, `post` and `keep` are called on the loader's threads; `post` must be safe to call from any thread.

        `keep`: called with what was posted, for work that nobody waits for; it must not raise. `pace`: None: no rests.
        `on_start`: called on each thread first.
        """
        self._fetch = fetch
        self._post = post
        self._keep = keep
        self._pace = pace
        self._on_start = on_start
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._futures: set[Future[None]] = set()
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(num_threads, "adapter-loader", initializer=self._begin)

    def submit(self, adapter: AdapterRef) -> None:
        """Start a load unless one of the same digest is under way. Returns at once."""
        with self._lock:
            if adapter.digest in self._in_flight:
                return
            self._in_flight.add(adapter.digest)
        try:
            future = self._threads.submit(self._run, adapter)
        except RuntimeError as error:  # the system gives no more threads
            _log.warning("no thread to load adapter %s: %r", adapter.label, error)
            refusal = AdapterUnavailableError(f"The weights of {adapter.label} cannot be loaded at present.")
            self._finish(LoadFinished(adapter.digest, None, refusal, 0.0))
            return
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Drop loads that have not begun, wait for those that have, `timeout` seconds at most."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait(self._futures.copy(), timeout)

    def _begin(self) -> None:
        if self._pace is not None:
            _give_way()
        if self._on_start is not None:
            self._on_start()

    def _run(self, adapter: AdapterRef) -> None:
        begun = time.thread_time()
        loaded = self._load(adapter)
        if loaded is not None and self._keep is not None:
            self._keep(adapter, loaded.value)
        if self._pace is not None:
            self._rest(self._pace, time.thread_time() - begun)

    def _rest(self, pace: Pace, used: float) -> None:
        """No longer than others run: whoever waits for a load then must not wait for this."""
        end = time.monotonic() + pace.pause(used, self._num_threads)
        while (left := end - time.monotonic()) > 0 and pace.is_busy():
            if self._closing.wait(min(left, _NAP)):
                return

    def _load(self, adapter: AdapterRef) -> Loaded[V] | None:
        start = time.perf_counter()
        loaded, error = self._try(adapter)
        seconds = time.perf_counter() - start
        message: LoadFinished[V] = LoadFinished(adapter.digest, None, error, seconds)
        if loaded is not None:
            message = LoadFinished(adapter.digest, loaded.value, None, seconds, loaded.times)
        self._finish(message)
        return loaded

    def _finish(self, message: LoadFinished[V]) -> None:
        with self._lock:  # before the post: whoever reads it may submit the same digest again at once
            self._in_flight.discard(message.digest)
        self._post(message)

    def _try(self, adapter: AdapterRef) -> tuple[Loaded[V] | None, LoraServeError | None]:
        try:
            return self._fetch(adapter), None
        except LoraServeError as error:
            return None, error
        except (OSError, MemoryError) as error:
            _log.warning("adapter %s could not be read: %r", adapter.label, error)
            return None, AdapterUnavailableError(f"The weights of {adapter.label} cannot be read at present.")
        except BaseException:  # whatever would end the thread must not keep the digest in flight for ever
            _log.exception("adapter %s failed to load", adapter.label)
            return None, InternalError(f"The weights of {adapter.label} could not be loaded.")


def _give_way() -> None:
    """The least share of a busy processor for this thread: on Linux a thread has a priority of its own.

    A step's parallel parts last as long as their slowest thread, which must not be one that a load keeps waiting. That
    a thread of low priority may hold the GIL does no harm: whoever waits for the GIL leaves it a core.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
