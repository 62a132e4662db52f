"""Engines that take turns: started, tried, measured round by round, watched while they are idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.processes import cpu_seconds, peak_rss
from benchmarks.peers.seam import Checkpoints, Peer, PeerError, Running
from benchmarks.side_by_side.figures import Run
from benchmarks.workload import Job, Load, Measured

Tell = Callable[[str], None]


@dataclass(slots=True)
class Entry:
    """One engine in the contest, and what becomes of it. `engine` is there while it can be measured."""

    peer: Peer
    engine: Running | None = None
    status: str = "not started"  # then: ready, slower, failed
    reason: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    trial_tokens_per_s: float = 0.0
    peak_rss: int = 0  # bytes
    idle_cpu_s: float = 0.0
    idle_s: float = 0.0

    @property
    def name(self) -> str:
        return self.peer.name

    def facts(self) -> dict[str, Any]:
        """For the report."""
        kept = ("status", "reason", "versions", "start_s", "trial_tokens_per_s", "peak_rss")
        told = {"engine": self.name, "family": self.peer.family, **{name: getattr(self, name) for name in kept}}
        share = round(self.idle_cpu_s / self.idle_s, 4) if self.idle_s else 0.0
        return told | {"idle_cores": share, "popularities": list(self.peer.popularities)}

    def leave(self, status: str, reason: str) -> None:
        """Out of the contest; its processes end."""
        self.status, self.reason = status, reason
        if self.engine is not None:
            self.peak_rss = peak_rss(self.engine.pid) or self.peak_rss
            self.engine.stop()
        self.engine = None


@dataclass(slots=True)
class Contest:
    """`entries` in the order in which they were entered."""

    checkpoints: Checkpoints
    load: Load
    num_threads: int
    tell: Tell = print
    entries: list[Entry] = field(default_factory=list)

    def enter(self, peers: Sequence[Peer], jobs: Callable[[str], list[Job]], trial: Load) -> None:
        """Start a family's members, one after another; the fastest in a trial stays, and it is warm then.

        One that fails is reported, and the others go on.
        """
        best: Entry | None = None
        for peer in peers:
            entry = self._start(peer)
            self._try(entry, jobs, trial)
            if entry.engine is None:
                continue
            if best is not None:
                slower, best = sorted((best, entry), key=lambda one: one.trial_tokens_per_s)
                slower.leave("slower", f"than {best.name} in the trial")
            else:
                best = entry

    def _start(self, peer: Peer) -> Entry:
        entry = Entry(peer)
        self.entries.append(entry)
        try:
            entry.versions = dict(peer.versions())
            entry.engine = peer.start(self.checkpoints, self.load, self.num_threads)
        except PeerError as error:
            entry.leave("failed", str(error))
            self.tell(f"{entry.name}: {error}")
            return entry
        entry.status, entry.start_s = "ready", round(entry.engine.start_seconds, 1)
        self.tell(f"{entry.name}: ready after {entry.start_s} s")
        return entry

    def _try(self, entry: Entry, jobs: Callable[[str], list[Job]], trial: Load) -> None:
        """Twice, as the first pass compiles and loads; the second counts."""
        if entry.engine is None:
            return
        popularity = "uniform" if "uniform" in entry.peer.popularities else "base"
        for _ in range(2):
            measured = self.run(entry, jobs(popularity), trial)
            if measured is not None:
                entry.trial_tokens_per_s = Run.of(
                    entry.name, entry.peer.family, popularity, 0, measured
                ).output_tokens_per_s
        if entry.engine is not None and not entry.trial_tokens_per_s:
            entry.leave("failed", "no request of the trial was answered whole")
        self.tell(f"{entry.name}: {entry.trial_tokens_per_s:.1f} tokens/s in the trial")

    def run(self, entry: Entry, jobs: Sequence[Job], load: Load) -> Measured | None:
        """None if the engine is gone or breaks down; the others' processor time meanwhile is noted."""
        if entry.engine is None:
            return None
        idle = [(other, cpu_seconds(other.engine.pid)) for other in self.entries if other.engine and other is not entry]
        start = time.perf_counter()
        try:
            return entry.engine.run(jobs, load)
        except PeerError as error:
            entry.leave("failed", str(error))
            self.tell(f"{entry.name}: {error}")
            return None
        finally:
            for other, before in idle:
                if other.engine is not None:
                    other.idle_cpu_s += cpu_seconds(other.engine.pid) - before
                    other.idle_s += time.perf_counter() - start

    def close(self) -> None:
        """End every engine, noting its peak memory."""
        for entry in self.entries:
            if entry.engine is not None:
                entry.leave("measured", "")

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.load), "threads": self.num_threads}


def turns(entries: Sequence[Entry], popularity: str, number: int) -> list[Entry]:
    """Who is measured in round `number` (from 0), each round begun by the next one, so none always follows the same."""
    able = [entry for entry in entries if entry.engine is not None and popularity in entry.peer.popularities]
    first = number % len(able) if able else 0
    return able[first:] + able[:first]
