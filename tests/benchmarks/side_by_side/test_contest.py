"""Who takes turns, in which order, and what becomes of an engine that fails; with engines that only pretend."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.seam import POPULARITIES, Checkpoints, PeerError
from benchmarks.side_by_side.contest import Contest, turns
from benchmarks.workload import Job, Load, Measured, Sample

LOAD = Load(num_requests=2, concurrency=2, output_tokens=2)


@dataclass
class Pretended:
    """A peer and its engine; `seconds` for a pass of 4 tokens, `faults`: what it raises, by call."""

    name: str
    seconds: float = 1.0
    family: str = "pretended"
    popularities: Sequence[str] = POPULARITIES
    faults: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 0.25
    num_runs: int = 0
    is_running: bool = False

    @property
    def pid(self) -> int:
        return os.getpid()

    def install(self) -> None:
        """Nothing to install."""

    def versions(self) -> Mapping[str, str]:
        self._fail("versions")
        return {"pretended": "1.0"}

    def start(self, checkpoints: Checkpoints, load: Load, num_threads: int) -> Pretended:
        self._fail("start")
        self.is_running = True
        return self

    def run(self, jobs: Sequence[Job], load: Load) -> Measured:
        self.num_runs += 1
        self._fail(f"run {self.num_runs}")
        return Measured(self.seconds, tuple(Sample(0.1, (0.1,), (5, 6), index) for index, _ in enumerate(jobs)))

    def stop(self) -> None:
        self.is_running = False

    def _fail(self, call: str) -> None:
        if call in self.faults:
            raise PeerError(self.faults[call])


def jobs(popularity: str) -> list[Job]:
    return [Job((1, 2), None), Job((3,), None)]


def contest(*families: Sequence[Pretended]) -> Contest:
    found = Contest(Checkpoints(Path(), {}, Path()), LOAD, 1, tell=lambda line: None)
    for family in families:
        found.enter(family, jobs, LOAD)
    return found


def names(found: Contest, popularity: str, number: int) -> list[str]:
    return [entry.name for entry in turns(found.entries, popularity, number)]


def test_each_round_is_begun_by_the_next_engine() -> None:
    found = contest([Pretended("a")], [Pretended("b")], [Pretended("c")])
    orders = [names(found, "uniform", number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_an_engine_without_lora_takes_its_turn_on_base_only() -> None:
    found = contest([Pretended("a")], [Pretended("b", popularities=("base",))])
    assert names(found, "base", 0) == ["a", "b"]
    assert names(found, "uniform", 0) == ["a"]
    assert names(contest(), "base", 3) == []


def test_of_a_family_only_the_fastest_goes_on_and_the_slower_is_ended() -> None:
    slow, fast, slowest = Pretended("slow", 2.0), Pretended("fast", 1.0), Pretended("slowest", 3.0)
    found = contest([slow, fast, slowest])
    assert names(found, "base", 0) == ["fast"]
    assert [peer.is_running for peer in (slow, fast, slowest)] == [False, True, False]
    assert [entry.status for entry in found.entries] == ["slower", "ready", "slower"]
    assert found.entries[0].reason == "than fast in the trial"


def test_a_peer_that_fails_to_start_is_reported_and_the_others_go_on() -> None:
    broken = Pretended("broken", faults={"start": "libfoo.so is not on this machine"})
    absent = Pretended("absent", faults={"versions": "not installed"})
    found = contest([broken, Pretended("twin")], [absent], [Pretended("other")])
    assert names(found, "base", 0) == ["twin", "other"]
    told = {entry.name: entry.facts() for entry in found.entries}
    assert (told["broken"]["status"], told["broken"]["reason"]) == ("failed", "libfoo.so is not on this machine")
    assert (told["absent"]["status"], told["absent"]["versions"]) == ("failed", {})
    assert told["twin"]["versions"] == {"pretended": "1.0"}


def test_an_engine_that_breaks_down_in_a_round_is_out_and_the_run_goes_on() -> None:
    frail = Pretended("frail", faults={"run 3": "ended under load (exit code -9)"})
    found = contest([frail], [Pretended("firm")])
    assert [found.run(entry, jobs("base"), LOAD) is None for entry in found.entries] == [True, False]
    assert found.entries[0].reason == "ended under load (exit code -9)"
    assert not frail.is_running
    assert names(found, "base", 1) == ["firm"]
    assert found.run(found.entries[0], jobs("base"), LOAD) is None


def test_an_engine_that_answers_nothing_in_the_trial_fails() -> None:
    @dataclass
    class Mute(Pretended):
        def run(self, jobs: Sequence[Job], load: Load) -> Measured:
            return Measured(1.0, (), len(jobs))

    found = contest([Mute("mute")])
    assert (found.entries[0].status, names(found, "base", 0)) == ("failed", [])


def test_whoever_is_idle_is_watched_while_another_works() -> None:
    found = contest([Pretended("a")], [Pretended("b")])
    a, b = found.entries
    before = a.idle_s
    found.run(b, jobs("base"), LOAD)
    assert a.idle_s > before
    assert b.idle_s == 0.0


def test_closing_ends_every_engine_and_notes_its_peak_memory() -> None:
    peers = [Pretended("a"), Pretended("b")]
    found = contest(*[[peer] for peer in peers])
    found.close()
    assert [entry.status for entry in found.entries] == ["measured", "measured"]
    assert all(entry.peak_rss > 10 * 2**20 for entry in found.entries)
    assert not any(peer.is_running for peer in peers)
