"""The event loop's lag in a house: how long each turn keeps the loop, and how late the loop calls what is due.

A turn is measured in processor time of the loop's own thread, which is the same on a busy machine. Lag counts whoever
keeps the loop or Python's lock; what the machine took is taken off, as that says nothing about the server: the time in
which a thread of this process was ready to run and there was no processor for it, and the time that other virtual
machines had a processor of this one (steal), which the system counts in steps of 10 ms. So is what a client here in the
same process computed, beyond an interval: `json.dumps` of a million numbers keeps the lock for 60 ms.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from asyncio import events
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lora_serve.server.upkeep import samples

INTERVAL = 0.01  # seconds
LIMIT = 0.05  # seconds: what the server promises
CLIENTS = ("MainThread", "canaries")  # names of the threads that the tests ask from
Threads = dict[str, tuple[float, float]]
_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc/stat
_PLAIN = events.Handle._run


@dataclass
class LagFigures:
    """Seconds; appended to by the loop's thread."""

    lags: list[float] = field(default_factory=list)  # without what the machine took
    wall: list[float] = field(default_factory=list)
    turns: list[tuple[float, str]] = field(default_factory=list)  # those of more than a millisecond, and of what

    def since(self, other: LagFigures) -> LagFigures:
        """Of what came after a mark."""
        return LagFigures(self.lags[len(other.lags) :], self.wall[len(other.wall) :], self.turns[len(other.turns) :])

    def mark(self) -> LagFigures:
        return LagFigures(self.lags.copy(), self.wall.copy(), self.turns.copy())

    @property
    def p99(self) -> float:
        return percentile(self.lags, 0.99)

    @property
    def longest_turn(self) -> tuple[float, str]:
        return max(self.turns, default=(0.0, ""))

    def __str__(self) -> str:
        seconds, name = self.longest_turn
        return (
            f"lag p50 {percentile(self.lags, 0.5) * 1000:.1f} ms, p99 {self.p99 * 1000:.1f} ms, "
            f"longest {max(self.lags, default=0) * 1000:.1f} ms "
            f"(by the clock on the wall p99 {percentile(self.wall, 0.99) * 1000:.1f} ms, "
            f"longest {max(self.wall, default=0) * 1000:.1f} ms); "
            f"longest turn {seconds * 1000:.1f} ms of {name}; {len(self.lags)} samples"
        )


_FIGURES: dict[int, LagFigures] = {}  # by the identity of the loop's thread


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)))] if ordered else 0.0


def time_turns_of(thread: threading.Thread, figures: LagFigures) -> None:
    """Every call of the event loop that runs on this thread."""
    assert thread.ident is not None
    _FIGURES[thread.ident] = figures
    if events.Handle._run is not _timed:
        events.Handle._run = _timed  # type: ignore[method-assign]


def _timed(handle: Any) -> None:
    figures = _FIGURES.get(threading.get_ident())
    if figures is None:
        return _PLAIN(handle)
    callback, started = handle._callback, time.thread_time()
    _PLAIN(handle)
    if (seconds := time.thread_time() - started) > 0.001:
        figures.turns.append((seconds, _name(callback)))
    return None


async def keep_probing(figures: LagFigures) -> None:
    """On the house's loop, without end."""
    loop, now, stolen = asyncio.get_running_loop(), _threads(), _stolen()
    while True:
        due = loop.time() + INTERVAL
        await asyncio.sleep(INTERVAL)
        lag = loop.time() - due
        before, now = now, _threads()
        stolen_before, stolen = stolen, _stolen()
        lost = max((after - old for after, old in zip(stolen, stolen_before, strict=True)), default=0.0)
        figures.wall += samples(lag, INTERVAL)
        figures.lags += samples(own_part(lag, before, now, _clients(), lost), INTERVAL)


def own_part(lag: float, before: Threads, now: Threads, clients: Collection[str] = (), stolen: float = 0.0) -> float:
    """What is left of a lag without what the machine and clients took. Where the machine took much, no more than one
    thread has computed: so long at most that one can have kept the lock, and the others passed it on to one another
    while they waited. `stolen`: seconds in which a processor was another machine's.
    """
    spent = {t: (now[t][0] - old[0], now[t][1] - old[1]) for t in now for old in (before.get(t, (0.0, 0.0)),)}
    of_clients = sum(ran for t, (ran, _) in spent.items() if t in clients)
    waited = [waited for _, waited in spent.values()]
    left = max(0.0, lag - max(waited) - stolen - max(0.0, of_clients - INTERVAL))
    longest = max((ran for t, (ran, _) in spent.items() if t not in clients), default=0.0)
    return left if sum(waited) + stolen < lag / 10 else min(left, longest)


def _clients() -> set[str]:
    return {str(thread.native_id) for thread in threading.enumerate() if thread.name in CLIENTS}


def _threads() -> Threads:
    """For each thread of this process, its seconds on a processor, and those it was ready to run and there was none."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            ran, waited, _ = file.read().split()
            found[thread] = (int(ran) / 1e9, int(waited) / 1e9)
    return found


def _stolen() -> list[float]:
    """Seconds for each processor of this machine."""
    with open("/proc/stat", encoding="ascii") as file:
        rows = [line.split() for line in file if line.startswith("cpu") and line[3] != " "]
    return [int(row[8]) / _TICKS for row in rows]


def _name(callback: Any) -> str:
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    return str(getattr(coroutine or callback, "__qualname__", callback))
