"""The threads that compute: who has an OpenMP team.

GNU's OpenMP waits at the end of a parallel loop by spinning only as long as all of its threads in the process fit the
processor. One more team, even an idle one, and each wait is a sleep: on two cores a decode step took 1.4 times as long.
A team belongs to the thread that ran a parallel loop, and ends with it. So only the engine's thread has a team.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

_LOOK_SECONDS = 1.0  # between two looks; a share of less time says little
_CONTENDED = 0.45  # share of time in which the engine's thread could run and had no core: 0.5 beside a busy neighbour
_FREE = 0.1
_PATIENCE, _MOST_PATIENCE = 1.0, 30.0  # seconds that the cores must be free before the team spins again
_STEADY_SECONDS = 60.0  # of spinning, after which patience begins anew
_GRAIN = 2**16  # numbers per thread: torch gives fewer to one thread
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def use_one_core() -> None:
    """Makes the calling thread compute on one core from now on, so that it has no team."""
    torch.get_num_threads()  # torch sets a thread's number once, at its first use
    runtime = openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)


@contextmanager
def one_core() -> Iterator[None]:
    """Makes the calling thread compute on one core inside the block: it waits for no team, which takes long where other
    threads keep the cores busy.
    """
    before, runtime = torch.get_num_threads(), openmp()
    use_one_core()
    try:
        yield
    finally:
        if runtime is not None:
            runtime.omp_set_num_threads(before)


@functools.cache
def openmp() -> Any:
    """torch's own OpenMP, whose functions every library finds from then on; None where it is of another kind."""
    path = openmp_path()
    return None if path is None else ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def openmp_path() -> Path | None:
    """The file of torch's own OpenMP."""
    package = Path(torch.__file__).parent
    found = [file for folder in (package / "lib", package.with_name("torch.libs")) for file in folder.glob("libgomp*")]
    return min(found, default=None)


class Sleep(Protocol):
    """A switch: the team sleeps from `hold` to `release`."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


class TeamWaits:
    """Called by the engine's thread after each step; looks at the cores now and then."""

    def __init__(
        self,
        sleep: Sleep,
        waited: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waited`: seconds for which the calling thread could have run and had no core, since its start."""
        self._sleep, self._waited, self._clock = sleep, waited, clock
        self._thread = 0
        self._at = self._waited_before = 0.0  # of the last look
        self._patience = _PATIENCE
        self._changed = float("-inf")  # when the team last began to spin, or the cores were last contended
        self.is_sleeping = False

    def after_step(self) -> None:
        """Never raises; costs microseconds."""
        now, thread = self._clock(), threading.get_native_id()
        if now - self._at < _LOOK_SECONDS and thread == self._thread:
            return
        waited = self._waited()
        share = (waited - self._waited_before) / (now - self._at) if thread == self._thread else None
        self._thread, self._at, self._waited_before = thread, now, waited
        if share is None:
            return
        if not self.is_sleeping:
            if share > _CONTENDED:
                self._begin_to_sleep(now)
        elif share > _FREE:
            self._changed = now
        elif now - self._changed >= self._patience:
            self._sleep.release()
            self.is_sleeping, self._changed = False, now

    def _begin_to_sleep(self, now: float) -> None:
        is_soon = now - self._changed < _STEADY_SECONDS
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if is_soon else _PATIENCE
        self._sleep.hold()
        self.is_sleeping, self._changed = True, now


class IdleTeam:
    """See Sleep: a team that has computed once and then does nothing, on a thread of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._end: threading.Event | None = None

    def hold(self) -> None:
        """Returns at once. Without a thread from the system the team goes on to spin."""
        end = self._end = threading.Event()
        with suppress(RuntimeError):
            threading.Thread(target=self._be_idle, args=(end,), name="idle team", daemon=True).start()

    def release(self) -> None:
        """Returns at once."""
        if self._end is not None:
            self._end.set()

    def _be_idle(self, end: threading.Event) -> None:
        torch.get_num_threads()  # torch sets a thread's number once, at its first use
        openmp().omp_set_num_threads(self._size)
        torch.zeros(self._size * _GRAIN).add_(1)
        end.wait()


def team_waits(device: torch.device) -> TeamWaits | None:
    """For the engine's thread; None where no team computes, or the system tells no thread's waits."""
    runtime, size = openmp(), torch.get_num_threads()
    if device.type != "cpu" or size == 1 or runtime is None or not _SCHEDSTAT.exists():
        return None
    return TeamWaits(IdleTeam(max(2, runtime.omp_get_num_procs() - size + 2)), _waited_of_this_thread)


def _waited_of_this_thread() -> float:
    return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
