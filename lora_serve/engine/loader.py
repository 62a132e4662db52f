"""Loads adapters on its own threads and posts the results. Touches no cache and no scheduler; no torch.

A load that exceeds its timeout is given up: its waiters get an error, another thread replaces the one that hangs, and
the digest is refused until the hung load returns; its late result is dropped.

The engine's thread and the loaders' share the in-flight map, so it has a lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InternalError, LoadHangsError, LoraServeError
from lora_serve.core.figures import Loaded, LoadTimes
from lora_serve.engine.watchdog_pool import WatchdogPool

V = TypeVar("V")
_MAX_PAUSE = 2.0  # seconds
_POLL_INTERVAL = 0.01  # seconds, while a thread rests
_CLOSE_SECONDS = 10.0  # a disk that is gone may keep a load for ever
LOAD_TIMEOUT = 60.0  # seconds
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadFinished(Generic[V]):
    """The end of one load; exactly one of `adapter` and `error` is given."""

    digest: str
    adapter: V | None
    error: LoraServeError | None
    seconds: float  # spent fetching; waiting for a thread is not counted
    times: LoadTimes | None = None  # None: the load failed
    extra_bytes: int = 0  # see `Loaded`


@dataclass(frozen=True, slots=True)
class Pace:
    """The share of one core that all loads together may take while requests run.

    After t seconds of processor time a thread rests until t is its share of the elapsed time; while nothing runs, it
    does not rest. Waiting for a disk or a network is not counted.
    """

    is_busy: Callable[[], bool]  # True if requests are running; called on the loader's threads
    share: float = 0.25

    def pause(self, used: float, num_threads: int) -> float:
        """Seconds to rest after `used` seconds of processor time, at most _MAX_PAUSE."""
        return min(_MAX_PAUSE, used * (num_threads / self.share - 1)) if self.is_busy() else 0.0


class _Load:
    """One load; compared by identity, as another of the same digest may come before or after it."""

    def __init__(self, adapter: AdapterRef) -> None:
        self.adapter = adapter
        self.has_begun = False


class Loader(Generic[V]):
    """Runs one load per digest, however many requests wait for it."""

    def __init__(
        self,
        fetch: Callable[[AdapterRef], Loaded[V]],
        post: Callable[[LoadFinished[V]], None],
        num_threads: int = 2,
        *,
        keep: Callable[[AdapterRef, V], None] | None = None,
        pace: Pace | None = None,
        on_start: Callable[[], None] | None = None,
        timeout: float = LOAD_TIMEOUT,
    ) -> None:
        """`fetch`, `post` and `keep` are called on the loader's threads; `post` must be safe to call from any thread.

        `keep`: called after the post, for work that nobody waits for; what it raises is logged. `pace` None: no rests.
        `on_start`: called first on each thread. `timeout`: seconds after which a load is given up.
        """
        self._fetch = fetch
        self._post = post
        self._keep = keep
        self._pace = pace
        self._on_start = on_start
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._in_flight: dict[str, _Load] = {}
        self._hung: dict[str, _Load] = {}  # given up, and still running
        self._closing = threading.Event()
        self._threads = WatchdogPool("adapter-loader", num_threads, timeout, self._begin)

    @property
    def is_busy(self) -> bool:
        """True while anything is loaded, or prepared for its next load; hung loads are not counted."""
        return self._threads.is_busy

    def submit(self, adapter: AdapterRef) -> None:
        """Start a load, unless one of the same digest is under way, and return at once."""
        load = _Load(adapter)
        with self._lock:
            if adapter.digest in self._in_flight:
                return
            self._in_flight[adapter.digest] = load
            hangs = adapter.digest in self._hung
        if hangs:
            self._finish(load, _hangs(adapter))
            return
        try:
            self._threads.submit(lambda: self._run(load), lambda: self._give_up(load), adapter.tenant)
        except AdapterUnavailableError as error:
            self._finish(load, error)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Drop loads that have not begun; wait for the others, except hung ones, `timeout` seconds at most."""
        self._closing.set()
        self._threads.close(timeout)

    def _begin(self) -> None:
        if self._pace is not None:
            _give_way()
        if self._on_start is not None:
            self._on_start()

    def _run(self, load: _Load) -> None:
        begun = time.thread_time()
        load.has_begun = True
        loaded = self._load(load)
        if loaded is not None and self._keep is not None:
            try:
                self._keep(load.adapter, loaded.value)
            except Exception:  # torch says in a RuntimeError that memory is short
                _log.exception("adapter %s is not prepared for its next load", load.adapter.label)
        with self._lock:
            if self._hung.get(load.adapter.digest) is load:
                del self._hung[load.adapter.digest]
                return
        if self._pace is not None:
            self._rest(self._pace, time.thread_time() - begun)

    def _give_up(self, load: _Load) -> None:
        """Called for a load that hangs, or cannot begin as all threads hang; it may just have ended."""
        adapter = load.adapter
        with self._lock:
            if self._in_flight.get(adapter.digest) is not load:
                return
            if load.has_begun:
                self._hung[adapter.digest] = load
        self._finish(load, _hangs(adapter))

    def _rest(self, pace: Pace, used: float) -> None:
        """Rests only while requests run: a load that is waited for then must not wait for this."""
        end = time.monotonic() + pace.pause(used, self._num_threads)
        while (left := end - time.monotonic()) > 0 and pace.is_busy():
            if self._closing.wait(min(left, _POLL_INTERVAL)):
                return

    def _load(self, load: _Load) -> Loaded[V] | None:
        start = time.perf_counter()
        loaded, error = self._try(load.adapter)
        self._finish(load, error, time.perf_counter() - start, loaded)
        return loaded

    def _finish(
        self, load: _Load, error: LoraServeError | None, seconds: float = 0.0, loaded: Loaded[V] | None = None
    ) -> None:
        """Posts the end of a load, unless it was given up or has ended before."""
        digest = load.adapter.digest
        with self._lock:  # before the post: its reader may submit the same digest again at once
            if self._in_flight.get(digest) is not load:
                return
            del self._in_flight[digest]
        value, times, extra = (None, None, 0) if loaded is None else (loaded.value, loaded.times, loaded.extra_bytes)
        self._post(LoadFinished(digest, value, error, seconds, times, extra))

    def _try(self, adapter: AdapterRef) -> tuple[Loaded[V] | None, LoraServeError | None]:
        try:
            return self._fetch(adapter), None
        except LoraServeError as error:
            return None, error
        except (OSError, MemoryError) as error:
            _log.warning("adapter %s could not be read: %r", adapter.label, error)
            return None, AdapterUnavailableError(f"The weights of {adapter.label} cannot be read at present.")
        except BaseException:  # the digest must not stay in flight for ever
            _log.exception("adapter %s failed to load", adapter.label)
            return None, InternalError(f"The weights of {adapter.label} could not be loaded.")


def _hangs(adapter: AdapterRef) -> LoadHangsError:
    return LoadHangsError(f"The store does not answer, so the weights of {adapter.label} cannot be loaded.", 10.0)


def _give_way() -> None:
    """Gives this thread the lowest priority (Linux has priorities per thread).

    A step's parallel parts last as long as their slowest thread, which must not wait for a load. A low-priority thread
    that holds the GIL does no harm: the threads that wait for the GIL leave it a core.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
